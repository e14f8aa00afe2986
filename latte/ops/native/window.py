"""Sliding-window attention on the CPU: the operators latte::window_attention and latte::window_attention_backward.

B batch, T queries, S keys (S - T of them history before the first query), H heads, G key-value heads, D and V widths.
"""

import struct
from typing import Any

import torch
from torch import Tensor

from latte.ops.native import library

torch.library.define(
    "latte::window_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? seg_q, Tensor? seg_k, SymInt left, SymInt right, float scale, "
    "float softcap) -> (Tensor, Tensor)",
)
torch.library.define(
    "latte::window_attention_backward",
    "(Tensor dy, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor y, Tensor lse, Tensor? seg_q, Tensor? seg_k, "
    "SymInt left, SymInt right, float scale, float softcap) -> (Tensor, Tensor, Tensor)",
)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seg_q: Tensor | None,
    seg_k: Tensor | None,
    left: int,
    right: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of each query to the `left` keys before its place, its own, and the `right` keys behind it.

    q: (B, T, H, D); k: (B, S, G, D); v: (B, S, G, V); H a multiple of G, S >= T; query i stands at key S - T + i.
    seg_q: (B, T), seg_k: (B, S) integer ids, or None for both: only equal ids see each other; a negative id sees and is
    seen by nothing. scale multiplies q.k (None: D ** -0.5); with a softcap it is softcap * tanh(scale * q.k / softcap).
    Returns y (B, T, H, V), zero where nothing is seen, and the log-sum-exp of the scores (B, T, H), -1e30 there.
    Raises ValueError on other shapes or dtypes.
    """
    B, T, H, D = q.shape
    S, G, V = k.shape[1], k.shape[2], v.shape[-1]
    library.same_kind(q=q, k=k, v=v)
    library.shape("k", k, B, S, G, D)
    library.shape("v", v, B, S, G, V)
    if H % G or S < T:
        raise ValueError(
            f"expected heads a multiple of key-value heads and no fewer keys than queries, got {H}, {G}, {S}, {T}"
        )
    if left < 0 or right < 0:
        raise ValueError(f"expected left and right >= 0, got {left} and {right}")
    if (seg_q is None) != (seg_k is None):
        raise ValueError("expected both seg_q and seg_k, or neither")
    if seg_q is not None and seg_k is not None:
        library.shape("seg_q", seg_q, B, T)
        library.shape("seg_k", seg_k, B, S)
        seg_q, seg_k = seg_q.to(torch.int32), seg_k.to(torch.int32)
    scale = D**-0.5 if scale is None else scale
    softcap = softcap or 0.0
    if library.direct(q, k, v):
        return _forward(q, k, v, seg_q, seg_k, left, right, scale, softcap)
    return torch.ops.latte.window_attention(q, k, v, seg_q, seg_k, left, right, scale, softcap)


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty(q.shape[:3])


def _sizes(q: Tensor, k: Tensor, v: Tensor, left: int, right: int, scale: float, softcap: float) -> tuple[int, ...]:
    B, T, H, D = q.shape
    S, G, V = k.shape[1], k.shape[2], v.shape[-1]
    bits = struct.unpack("qq", struct.pack("dd", scale, softcap))
    return (*library.header(q), B, T, S, H, G, D, V, min(left, S), min(right, S), *bits)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seg_q: Tensor | None,
    seg_k: Tensor | None,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    q, k, v = library.rows(q), library.rows(k), library.rows(v)
    seg_q, seg_k = (None if x is None else x.contiguous() for x in (seg_q, seg_k))
    y, lse = _outputs(q, v)
    library.kernel("window_forward")(
        (
            *_sizes(q, k, v, left, right, scale, softcap),
            *(field for x in (q, k, v, y) for field in library.view(x)),
            *(library.pointer(x) for x in (lse, seg_q, seg_k)),
        )
    )
    return y, lse


def _backward(
    dy: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    seg_q: Tensor | None,
    seg_k: Tensor | None,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, y, dy = (library.rows(x) for x in (q, k, v, y, dy))
    lse, dlse = lse.contiguous(), dlse.contiguous()
    seg_q, seg_k = (None if x is None else x.contiguous() for x in (seg_q, seg_k))
    dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    library.kernel("window_backward")(
        (
            *_sizes(q, k, v, left, right, scale, softcap),
            *(field for x in (q, k, v, y, dy, dq, dk, dv) for field in library.view(x)),
            *(library.pointer(x) for x in (lse, dlse, seg_q, seg_k)),
        )
    )
    return dq, dk, dv


torch.library.impl("latte::window_attention", "CPU", _forward)
torch.library.impl("latte::window_attention_backward", "CPU", _backward)


@torch.library.register_fake("latte::window_attention")
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q, v)


@torch.library.register_fake("latte::window_attention_backward")
def _(dy: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, seg_q, seg_k, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, *output, seg_q, seg_k)


def _gradients(ctx: Any, dy: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.latte.window_attention_backward(dy, dlse, *ctx.saved_tensors, *ctx.settings)
    return (*grads, *(None,) * 6)


library.register_gradients("window_attention", _gradients, _save)
