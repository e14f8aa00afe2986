"""The RG-LRU on the CPU: the operators latte::rglru and latte::rglru_backward.

B batch, T tokens, H blocks of W channels.
"""

from typing import Any

import torch
from torch import Tensor

from latte.ops.native import library

torch.library.define(
    "latte::rglru",
    "(Tensor gates, Tensor x, Tensor bias, Tensor rate, Tensor h0, Tensor count0, Tensor? mask, Tensor? reset) "
    "-> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "latte::rglru_backward",
    "(Tensor dy, Tensor dh1, Tensor gates, Tensor x, Tensor bias, Tensor rate, Tensor h0, Tensor count0, "
    "Tensor? mask, Tensor? reset) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def rglru(
    gates: Tensor,
    x: Tensor,
    bias: Tensor,
    rate: Tensor,
    h0: Tensor,
    count0: Tensor,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t x_t with log a = -rate sigmoid(gates[0] + bias[0]), i likewise.

    gates: (2, B, T, H, W), recurrence and input gate; x: (B, T, H, W); bias: (2, H, W); rate: (H, W); h0: (B, H * W);
    count0: (B) int64, tokens of its document that the state has read: the first is not scaled by the square root.
    mask: (B, T) bool, True at real tokens; reset: (B, T) bool, True where a document starts.
    Returns h (B, T, H, W), 0 at padding, the last h (B, H * W) and the new count. Raises ValueError on other shapes.
    """
    B, T, H, W = x.shape
    dtype = library.same_kind(gates=gates, x=x, bias=bias, rate=rate, h0=h0)
    library.shape("gates", gates, 2, B, T, H, W)
    library.shape("bias", bias, 2, H, W)
    library.shape("rate", rate, H, W)
    library.shape("h0", h0, B, H * W)
    library.shape("count0", count0, B)
    library.tokens("mask", mask, B, T)
    library.tokens("reset", reset, B, T)
    assert dtype == h0.dtype
    if library.direct(gates, x, bias, rate, h0) and T <= 16:
        return _forward(gates, x, bias, rate, h0, count0, mask, reset)
    return torch.ops.latte.rglru(gates, x, bias, rate, h0, count0, mask, reset)


def _plain(*tensors: Tensor | None) -> Any:
    return (None if x is None else x.contiguous() for x in tensors)


def _forward(
    gates: Tensor,
    x: Tensor,
    bias: Tensor,
    rate: Tensor,
    h0: Tensor,
    count0: Tensor,
    mask: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    gates, x = library.rows(gates), library.rows(x)
    bias, rate, h0, count0, mask, reset = _plain(bias, rate, h0, count0, mask, reset)
    y, h1, count1 = x.new_empty(x.shape), h0.new_empty(h0.shape), count0.new_empty(count0.shape)
    library.kernel("rglru_forward")(
        (
            *library.header(x),
            *x.shape,
            *(field for tensor in (gates[0], gates[1], x, y) for field in library.view(tensor)),
            *(library.pointer(tensor) for tensor in (bias, rate, h0, h1, count0, count1, mask, reset)),
        )
    )
    return y, h1, count1


def _backward(
    dy: Tensor,
    dh1: Tensor,
    gates: Tensor,
    x: Tensor,
    bias: Tensor,
    rate: Tensor,
    h0: Tensor,
    count0: Tensor,
    mask: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gates, x, dy = library.rows(gates), library.rows(x), library.rows(dy)
    bias, rate, h0, dh1, count0, mask, reset = _plain(bias, rate, h0, dh1, count0, mask, reset)
    B = x.shape[0]
    dgates, dx, dh0 = torch.empty_like(gates), x.new_empty(x.shape), h0.new_empty(h0.shape)
    dbias, drate = x.new_empty((B, *bias.shape)), x.new_empty((B, *rate.shape))
    views = (gates[0], gates[1], x, dy, dgates[0], dgates[1], dx)
    library.kernel("rglru_backward")(
        (
            *library.header(x),
            *x.shape,
            *(field for tensor in views for field in library.view(tensor)),
            *(library.pointer(t) for t in (bias, rate, h0, dh1, dbias, drate, dh0, count0, mask, reset)),
        )
    )
    return dgates, dx, dbias.sum(0), drate.sum(0), dh0


torch.library.impl("latte::rglru", "CPU", _forward)
torch.library.impl("latte::rglru_backward", "CPU", _backward)


@torch.library.register_fake("latte::rglru")
def _(
    gates: Tensor, x: Tensor, bias: Tensor, rate: Tensor, h0: Tensor, count0: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), h0.new_empty(h0.shape), count0.new_empty(count0.shape)


@torch.library.register_fake("latte::rglru_backward")
def _(
    dy: Tensor, dh1: Tensor, gates: Tensor, x: Tensor, bias: Tensor, rate: Tensor, h0: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return torch.empty_like(gates), *(tensor.new_empty(tensor.shape) for tensor in (x, bias, rate, h0))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)
    ctx.mark_non_differentiable(output[2])


def _gradients(ctx: Any, dy: Tensor, dh1: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return (*torch.ops.latte.rglru_backward(dy, dh1, *ctx.saved_tensors), None, None, None)


library.register_gradients("rglru", _gradients, _save)
