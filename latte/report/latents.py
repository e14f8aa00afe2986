"""Statistics of a layer's latents: share and reach of each, and how evenly tokens use them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from latte.report.inspection import LayerView


@dataclass(frozen=True)
class LatentUse:
    """Statistics of one layer; H heads, M slots (slot 0 is the window, if there is one)."""

    use_HM: np.ndarray  # mean over tokens of p(l|t)
    entropy_H: np.ndarray  # mean over tokens of the entropy of p(.|t), in bits, all slots
    effective_H: np.ndarray  # e^entropy of the latents' mean shares: the effective number of latents
    reach_HL: np.ndarray  # e^entropy of p(s|l,t) at the last token: the effective number of positions
    window_H: np.ndarray | None  # mean over tokens of p(0|t)


def latent_use(layer: LayerView) -> LatentUse:
    """Figures of a layer that has latents.

    Raises:
        ValueError: it has none.
    """
    if layer.slots_THM is None or layer.keys_THM is None:
        raise ValueError(f"mixer {layer.mixer!r} has no latents")
    slots_THM = layer.slots_THM.astype(np.float64)
    use_HM = slots_THM.mean(axis=0)
    latents_HL = use_HM if layer.window_HTS is None else use_HM[:, 1:]
    latents_HL = latents_HL / np.maximum(latents_HL.sum(axis=-1, keepdims=True), 1e-30)
    last = layer.slots_THM.shape[0] - 1
    heads, latents = latents_HL.shape
    reads_HLS = np.array([[layer.reads(head, latent, last) for latent in range(latents)] for head in range(heads)])
    return LatentUse(
        use_HM=use_HM,
        entropy_H=entropy(slots_THM).mean(axis=0) / np.log(2.0),
        effective_H=np.exp(entropy(latents_HL)),
        reach_HL=np.exp(entropy(reads_HLS)),
        window_H=None if layer.window_HTS is None else use_HM[:, 0],
    )


def entropy(p: np.ndarray) -> np.ndarray:
    """In nats, along the last axis; 0 log 0 is 0."""
    return -(p * np.log(np.maximum(p, 1e-300))).sum(axis=-1)
