"""Use of latents: how evenly a layer's latents are used, how many are dead, and how much they read the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from latte.mixers import Mixer
from latte.tokens import Tokens

#: A latent whose mean share is below this part of an even one is dead.
DEAD = 0.1
#: Rows and tokens that the figures are measured on: ``look`` is quadratic in the tokens.
ROWS, TOKENS = 2, 256


@dataclass(frozen=True)
class LayerLatents:
    """Means over the heads of one layer."""

    entropy: float  # of p(l), the latents' mean shares, as a part of its maximum: 1 if all are used alike
    dead: float  # share of latents with hardly any use
    overlap: float  # mean cosine of p(s|l) of two latents: 1 if all read the same tokens


@contextmanager
def mixer_inputs(mixers: list[Mixer]) -> Iterator[dict[Mixer, tuple[Tensor, Tokens | None]]]:
    """What mixers anywhere in a model are called with, while it reads."""
    inputs: dict[Mixer, tuple[Tensor, Tokens | None]] = {}

    def note(mixer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("x_BTD", "state", "tokens"), args, strict=False)) | kwargs
        inputs[mixer] = (given["x_BTD"], given.get("tokens"))

    handles = [mixer.register_forward_pre_hook(note, with_kwargs=True) for mixer in mixers]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def latent_metrics(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, float]:
    """``latents_entropy_N``, ``latents_dead_N`` and ``latents_overlap_N`` of every layer N that has latents.

    Args:
        batch: ids and masks; the first rows and tokens are read.
    """
    mixers = [module for module in model.modules() if isinstance(module, Mixer) and _has_latents(module)]
    if not mixers:
        return {}
    kept = {name: value[:ROWS, :TOKENS] for name, value in batch.items() if value.dim() == 2 and name != "labels"}
    keywords = {"use_cache": False} if getattr(model, "can_generate", lambda: False)() else {}
    with mixer_inputs(mixers) as inputs:
        model(**kept, **keywords)
        looked = {mixer.config.layer_index: _layer(mixer, *inputs[mixer]) for mixer in mixers if mixer in inputs}
    return {
        f"latents_{name}_{layer}": getattr(figures, name)
        for layer, figures in looked.items()
        for name in ("entropy", "dead", "overlap")
    }


def _has_latents(mixer: Mixer) -> bool:
    return getattr(mixer, "latent_q_proj", None) is not None


def _layer(mixer: Mixer, x_BTD: Tensor, tokens: Tokens | None) -> LayerLatents:
    views = mixer.look(x_BTD, tokens)
    slots_BTHM, keys_BTHM = views["latents"].values.double(), views["latent_keys"].values.double()
    latents_BTHM = slots_BTHM[..., 1:] if "window" in views else slots_BTHM
    real_BT = torch.ones(x_BTD.shape[:2], dtype=torch.bool) if tokens is None or tokens.mask is None else tokens.mask
    use_HM = latents_BTHM[real_BT].mean(dim=0)
    return layer_latents(use_HM, keys_BTHM.masked_fill(~real_BT[..., None, None], -torch.inf))


def layer_latents(use_HM: Tensor, keys_BTHM: Tensor) -> LayerLatents:
    """Figures from mean shares of the latents and from their keys, whose softmax over all tokens is p(s|l)."""
    count = use_HM.shape[-1]
    share_HM = use_HM / use_HM.sum(dim=-1, keepdim=True).clamp(min=1e-30)
    entropy_H = torch.special.entr(share_HM).sum(dim=-1)
    reads_BHMT = keys_BTHM.softmax(dim=1).permute(0, 2, 3, 1)
    unit = reads_BHMT / reads_BHMT.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    pairs = max(1, count * (count - 1))
    alike_BH = ((unit @ unit.mT).sum(dim=(-2, -1)) - count) / pairs
    return LayerLatents(
        entropy=float((entropy_H / torch.tensor(float(max(2, count))).log()).mean()),
        dead=float((share_HM < DEAD / count).double().mean()),
        overlap=float(alike_BH.mean()) if count > 1 else 0.0,
    )
