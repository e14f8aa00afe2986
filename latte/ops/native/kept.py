"""Attention to kept tokens on the CPU: the operators latte::kept_select, latte::kept_attention and its backward pass.

B batch, T queries in blocks of C, N slots, S sources, H heads, G key-value heads, D and V widths.
"""

import struct
from typing import Any

import torch
from torch import Tensor

from latte.ops.native import library

torch.library.define(
    "latte::kept_select",
    "(Tensor score, Tensor place, Tensor event, Tensor there, Tensor segment, SymInt block) "
    "-> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "latte::kept_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? far_q, Tensor? far_k, Tensor source, Tensor last, "
    "Tensor? place_q, Tensor? place_k, SymInt block, SymInt reach, float scale, float softcap) -> (Tensor, Tensor)",
)
torch.library.define(
    "latte::kept_attention_backward",
    "(Tensor dy, Tensor dlse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? far_q, Tensor? far_k, Tensor y, "
    "Tensor lse, Tensor source, Tensor last, Tensor? place_q, Tensor? place_k, SymInt block, SymInt reach, "
    "float scale, float softcap) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def kept_select(
    score: Tensor, place: Tensor, event: Tensor, there: Tensor, segment: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens are kept for which queries; see latte/ops/kept_selection.py.

    score, place: (B, G, N), place negative where a slot is empty; event: (B, T, G); there: bool (B, T); segment (B, T).
    Returns sources and last queries, int32 (B, blocks, G, N + block), and sources in the slots afterwards, (B, G, N).
    """
    if library.direct(score, event):
        return _select(score, place, event, there, segment, block)
    return torch.ops.latte.kept_select(score, place, event, there, segment, block)


def _selected(score: Tensor, event: Tensor, block: int) -> tuple[Tensor, Tensor, Tensor]:
    (B, G, N), T = score.shape, event.shape[1]
    shape = (B, (T + block - 1) // block, G, N + block)
    source, last = (score.new_empty(shape, dtype=torch.int32) for _ in range(2))
    return source, last, score.new_empty((B, G, N), dtype=torch.long)


def _select(
    score: Tensor, place: Tensor, event: Tensor, there: Tensor, segment: Tensor, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    (B, G, N), T = score.shape, event.shape[1]
    score, place, event, there, segment = (x.contiguous() for x in (score, place, event, there, segment))
    source, last, after = _selected(score, event, block)
    pointers = (score, event, place, there, segment, source, last, after)
    library.kernel("kept_select")((*library.header(score), B, T, G, N, block, *(x.data_ptr() for x in pointers)))
    return source, last, after


def kept_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    far_q: Tensor | None,
    far_k: Tensor | None,
    source: Tensor,
    last: Tensor,
    place_q: Tensor | None,
    place_k: Tensor | None,
    block: int,
    reach: int,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of blocks of queries to the sources that :func:`kept_select` gives them.

    q: (B, T, H, D); k: (B, S, G, D); v: (B, S, G, V); bias: (B, S, G), added to logits. reach 0: none; else a query at
    place_q (B, T) and a source at place_k (B, S, G) that are further apart meet as far_q and far_k.
    Returns y (B, T, H, V), zero where nothing is seen, and the log-sum-exp of the scores (B, T, H), -1e30 there.
    """
    library.same_kind(q=q, k=k, v=v)
    args = (q, k, v, bias, far_q, far_k, source, last, place_q, place_k, block, reach, scale, softcap or 0.0)
    if library.direct(q, k, v, bias, far_q, far_k):
        return _forward(*args)
    return torch.ops.latte.kept_attention(*args)


def _rows(x: Tensor | None) -> Tensor | None:
    return None if x is None else library.rows(x)


def _view(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if x is None else library.view(x)


def _sizes(
    q: Tensor, k: Tensor, v: Tensor, source: Tensor, block: int, reach: int, scale: float, softcap: float
) -> tuple[int, ...]:
    (B, T, H, D), (S, G), V = q.shape, k.shape[1:3], v.shape[-1]
    blocks, entries = source.shape[1], source.shape[3]
    bits = struct.unpack("qq", struct.pack("dd", scale, softcap))
    return (*library.header(q), B, T, S, H, G, D, V, entries - block, block, blocks, reach, *bits)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    far_q: Tensor | None,
    far_k: Tensor | None,
    source: Tensor,
    last: Tensor,
    place_q: Tensor | None,
    place_k: Tensor | None,
    block: int,
    reach: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    q, k, v = library.rows(q), library.rows(k), library.rows(v)
    far_q, far_k = _rows(far_q), _rows(far_k)
    bias, place_q, place_k = (None if x is None else x.contiguous() for x in (bias, place_q, place_k))
    y, lse = q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty(q.shape[:3])
    library.kernel("kept_forward")(
        (
            *_sizes(q, k, v, source, block, reach, scale, softcap),
            *(field for x in (q, far_q, k, far_k, v, y) for field in _view(x)),
            *(library.pointer(x) for x in (lse, bias, source, last, place_q, place_k)),
        )
    )
    return y, lse


def _backward(
    dy: Tensor,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    far_q: Tensor | None,
    far_k: Tensor | None,
    y: Tensor,
    lse: Tensor,
    source: Tensor,
    last: Tensor,
    place_q: Tensor | None,
    place_k: Tensor | None,
    block: int,
    reach: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, ...]:
    q, k, v, y, dy = (library.rows(x) for x in (q, k, v, y, dy))
    far_q, far_k = _rows(far_q), _rows(far_k)
    bias, place_q, place_k = (None if x is None else x.contiguous() for x in (bias, place_q, place_k))
    lse, dlse = lse.contiguous(), dlse.contiguous()
    dq, dk, dv = q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    dbias, dfar_q, dfar_k = (q.new_zeros(0 if x is None else x.shape) for x in (bias, far_q, far_k))
    fields = (q, far_q, k, far_k, v, y, dy, dq, dfar_q if reach else None, dk, dfar_k if reach else None, dv)
    library.kernel("kept_backward")(
        (
            *_sizes(q, k, v, source, block, reach, scale, softcap),
            *(field for x in fields for field in _view(x)),
            *(library.pointer(x) for x in (lse, dlse, bias, dbias, source, last, place_q, place_k)),
        )
    )
    return dq, dk, dv, dbias, dfar_q, dfar_k


torch.library.impl("latte::kept_select", "CPU", _select)
torch.library.impl("latte::kept_attention", "CPU", _forward)
torch.library.impl("latte::kept_attention_backward", "CPU", _backward)


@torch.library.register_fake("latte::kept_select")
def _(score: Tensor, place: Tensor, event: Tensor, there: Tensor, segment: Tensor, block: int) -> tuple[Tensor, ...]:
    return _selected(score, event, block)


@torch.library.register_fake("latte::kept_attention")
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[-1])), q.new_empty(q.shape[:3])


@torch.library.register_fake("latte::kept_attention_backward")
def _(dy: Tensor, dlse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(q.new_empty(0 if x is None else x.shape) for x in (q, k, v, *rest[:3]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.there = [x is not None for x in inputs[3:6]]
    ctx.save_for_backward(*inputs[:6], *output, *inputs[6:10])
    ctx.settings = inputs[10:]


def _gradients(ctx: Any, dy: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.latte.kept_attention_backward(dy, dlse, *ctx.saved_tensors, *ctx.settings)
    optional = (grad if there else None for grad, there in zip(grads[3:], ctx.there, strict=True))
    return (*grads[:3], *optional, *(None,) * 8)


library.register_gradients("kept_attention", _gradients, _save)
