"""The diagonal scan on the CPU: the operators latte::diagonal_scan and latte::diagonal_scan_backward.

B batch, T tokens, D channels.
"""

from typing import Any

import torch
from torch import Tensor

from latte.ops.native import library

torch.library.define(
    "latte::diagonal_scan",
    "(Tensor log_a, Tensor b, Tensor h0, Tensor? mask, Tensor? reset, bool reverse) -> (Tensor, Tensor)",
)
torch.library.define(
    "latte::diagonal_scan_backward",
    "(Tensor dh, Tensor dh1, Tensor log_a, Tensor b, Tensor h0, Tensor? mask, Tensor? reset, bool reverse) "
    "-> (Tensor, Tensor, Tensor)",
)


def diagonal_scan(
    log_a: Tensor,
    b: Tensor,
    h0: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run h_t = exp(log_a_t) h_{t-1} + b_t, or from right to left h_t = exp(log_a_t) h_{t+1} + b_t.

    log_a: (B, T, D), at most 0; b: (B, T, D); h0: (B, D) or None, the state before the first token consumed.
    mask: (B, T) bool, True at real tokens: others keep the state, and give 0. reset: (B, T) bool, True where a document
    starts: no state passes between that token and the one before it, in either direction.
    Returns h (B, T, D) and the state after the last token consumed (B, D). Raises ValueError on other shapes or dtypes.
    """
    B, T, D = log_a.shape
    h0 = b.new_zeros((B, D)) if h0 is None else h0
    library.same_kind(log_a=log_a, b=b, h0=h0)
    library.shape("b", b, B, T, D)
    library.shape("h0", h0, B, D)
    library.tokens("mask", mask, B, T)
    library.tokens("reset", reset, B, T)
    if library.direct(log_a, b, h0) and T <= 16:
        return _forward(log_a, b, h0, mask, reset, reverse)
    return torch.ops.latte.diagonal_scan(log_a, b, h0, mask, reset, reverse)


def _forward(
    log_a: Tensor, b: Tensor, h0: Tensor, mask: Tensor | None, reset: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    log_a, b, h0 = library.rows(log_a), library.rows(b), h0.contiguous()
    mask, reset = (None if x is None else x.contiguous() for x in (mask, reset))
    h, h1 = b.new_empty(b.shape), b.new_empty(h0.shape)
    library.kernel("scan_forward")(
        (
            *library.header(b),
            *b.shape,
            int(reverse),
            *(field for x in (log_a, b, h) for field in library.flat_view(x)),
            *(library.pointer(x) for x in (h0, h1, mask, reset)),
        )
    )
    return h, h1


def _backward(
    dh: Tensor,
    dh1: Tensor,
    log_a: Tensor,
    b: Tensor,
    h0: Tensor,
    mask: Tensor | None,
    reset: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    log_a, b, dh = library.rows(log_a), library.rows(b), library.rows(dh)
    h0, dh1 = h0.contiguous(), dh1.contiguous()
    mask, reset = (None if x is None else x.contiguous() for x in (mask, reset))
    dlog_a, db, dh0 = b.new_empty(b.shape), b.new_empty(b.shape), b.new_empty(h0.shape)
    library.kernel("scan_backward")(
        (
            *library.header(b),
            *b.shape,
            int(reverse),
            *(field for x in (log_a, b, dh, dlog_a, db) for field in library.flat_view(x)),
            *(library.pointer(x) for x in (h0, dh1, dh0, mask, reset)),
        )
    )
    return dlog_a, db, dh0


torch.library.impl("latte::diagonal_scan", "CPU", _forward)
torch.library.impl("latte::diagonal_scan_backward", "CPU", _backward)


@torch.library.register_fake("latte::diagonal_scan")
def _(log_a: Tensor, b: Tensor, h0: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return b.new_empty(b.shape), b.new_empty(h0.shape)


@torch.library.register_fake("latte::diagonal_scan_backward")
def _(dh: Tensor, dh1: Tensor, log_a: Tensor, b: Tensor, h0: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return b.new_empty(b.shape), b.new_empty(b.shape), b.new_empty(h0.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.reverse = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, dh: Tensor, dh1: Tensor) -> tuple[Tensor | None, ...]:
    return (*torch.ops.latte.diagonal_scan_backward(dh, dh1, *ctx.saved_tensors, ctx.reverse), None, None, None)


library.register_gradients("diagonal_scan", _gradients, _save)
