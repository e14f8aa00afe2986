"""Arrays embedded in a page: 16 bits per number, deflated, in base64."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np

from latte.report.inspection import Inspection, LayerView

#: Probabilities are stored as integers in units of 1/PARTS; each row sums to exactly PARTS.
PARTS = 65535


def embed(value: Any) -> str:
    """Compact JSON for a ``<script>`` element, with ``<`` escaped."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")


def pack(array: np.ndarray) -> dict[str, Any]:
    """A uint16 array as its shape and base64 of its deflated bytes: first all high bytes, which compress well."""
    flat = np.ascontiguousarray(array, dtype=np.uint16).ravel()
    planes = np.concatenate([flat >> 8, flat & 255]).astype(np.uint8).tobytes()
    return {"shape": list(array.shape), "data": base64.b64encode(zlib.compress(planes, 9)).decode("ascii")}


def unpack(packed: dict[str, Any]) -> np.ndarray:
    """The inverse of :func:`pack`, as the page does it."""
    planes = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"])), dtype=np.uint8).astype(np.uint16)
    high, low = planes.reshape(2, -1)
    return (high << 8 | low).reshape(packed["shape"])


def shares(rows: np.ndarray) -> np.ndarray:
    """Distributions along the last axis as integers that sum to PARTS, each rounded by less than 1."""
    exact = rows.astype(np.float64)
    exact = np.clip(exact, 0, None) * (PARTS / np.clip(exact.sum(axis=-1, keepdims=True), 1e-30, None))
    whole = np.floor(exact)
    missing = np.rint(PARTS - whole.sum(axis=-1)).astype(np.int64)
    # The largest remainders are rounded up, as many as are missing.
    order = np.argsort(whole - exact, axis=-1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(rows.shape[-1]), rows.shape), axis=-1)
    return (whole + (rank < missing[..., None])).astype(np.uint16)


def encode_inspection(inspection: Inspection) -> dict[str, Any]:
    """An inspection as JSON values. Latent layers are stored as factors, which are far smaller than their product."""
    return {
        "title": inspection.title,
        "tokens": list(inspection.tokens),
        "surprise": None if inspection.surprise is None else [round(float(x), 3) for x in inspection.surprise],
        "dropped": inspection.dropped,
        "reason": inspection.reason,
        "start": _start(inspection),
        "layers": [_layer(layer) for layer in inspection.layers],
    }


def _start(inspection: Inspection) -> dict[str, int]:
    """The layer, head and token shown first: the head that divides its attention most evenly between window and
    latents, or else one that is neither sharp nor uniform; and a late token for which the same holds."""
    tokens = len(inspection.tokens)
    begin = tokens // 2
    best, place = -1.0, (0, 0, int(tokens * 0.6))
    for index, layer in enumerate(inspection.layers):
        if layer.weights_HTS is None:
            continue
        share_TH = layer.window_share()
        sharp_H = 1 - np.abs(layer.weights_HTS.max(axis=-1).mean(axis=-1) - 0.4)
        score_H = sharp_H if share_TH is None else 2 - np.abs(share_TH.mean(axis=0) - 0.5)
        if score_H.max() > best:
            head = int(score_H.argmax())
            late_T = np.arange(begin, max(begin + 1, int(tokens * 0.8)))
            fit_T = -np.abs(layer.weights_HTS[head, late_T].max(axis=-1) - 0.4)
            fit_T = fit_T if share_TH is None else fit_T - np.abs(share_TH[late_T, head] - 0.5)
            best, place = float(score_H.max()), (index, head, begin + int(fit_T.argmax()))
    return dict(zip(("layer", "head", "token"), place, strict=True))


def _layer(layer: LayerView) -> dict[str, Any]:
    result: dict[str, Any] = {"mixer": layer.mixer, "causal": layer.causal, "heads": layer.heads}
    if layer.slots_THM is None or layer.keys_THM is None:
        if layer.weights_HTS is not None:
            result["weights"] = pack(shares(_row_shares(layer)))
            result["signed"] = not layer.normalised
        return result
    result["slots"] = pack(shares(layer.slots_THM.transpose(1, 0, 2)))  # (H, T, M)
    keys_HMT = layer.keys_THM.transpose(1, 2, 0).astype(np.float64)
    low = keys_HMT.min(axis=-1)
    step = np.maximum(keys_HMT.max(axis=-1) - low, 1e-9) / PARTS
    # A softmax does not depend on the lowest logit, so only the step is stored.
    result["keys"] = pack(np.rint((keys_HMT - low[..., None]) / step[..., None]))  # (H, M, T)
    result["steps"] = [[float(f"{value:.7g}") for value in row] for row in step]
    if layer.window_HTS is not None:
        result["window"] = pack(shares(layer.window_HTS))
    return result


def _row_shares(layer: LayerView) -> np.ndarray:
    """The weights where they sum to 1, else each one's share of their absolute values."""
    assert layer.weights_HTS is not None
    if layer.normalised:
        return layer.weights_HTS
    size_HTS = np.abs(layer.weights_HTS)
    return size_HTS / np.maximum(size_HTS.sum(axis=-1, keepdims=True), 1e-30)
