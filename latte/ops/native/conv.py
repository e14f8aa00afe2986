"""The causal depthwise convolution on the CPU: the operators latte::causal_conv and latte::causal_conv_backward.

B batch, T tokens, D channels, K taps.
"""

from typing import Any

import torch
from torch import Tensor

from latte.ops.native import library

torch.library.define(
    "latte::causal_conv",
    "(Tensor x, Tensor weight, Tensor bias, Tensor tail, Tensor? mask, Tensor? reset) -> (Tensor, Tensor)",
)
torch.library.define(
    "latte::causal_conv_backward",
    "(Tensor dy, Tensor dtail, Tensor x, Tensor weight, Tensor tail, Tensor? mask, Tensor? reset) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y_t = bias + sum_k weight_k . x_{t-K+1+k} over the K latest real tokens of a document.

    x: (B, T, D); weight: (D, K), the present token's tap last; bias: (D,) or None; tail: (B, K - 1, D), the inputs
    before the first token. mask: (B, T) bool, True at real tokens: others are passed over, and give 0. reset: (B, T)
    bool, True where a document starts. Returns y and the tail after the last token. Raises ValueError on other shapes
    or dtypes.
    """
    B, T, D = x.shape
    bias = weight.new_zeros(D) if bias is None else bias
    library.same_kind(x=x, weight=weight, bias=bias, tail=tail)
    library.shape("weight", weight, D, weight.shape[1])
    library.shape("bias", bias, D)
    library.shape("tail", tail, B, weight.shape[1] - 1, D)
    library.tokens("mask", mask, B, T)
    library.tokens("reset", reset, B, T)
    return torch.ops.latte.causal_conv(x, weight, bias, tail, mask, reset)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor, tail: Tensor, mask: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    x, taps, bias, tail = library.rows(x), weight.T.contiguous(), bias.contiguous(), tail.contiguous()
    mask, reset = (None if flags is None else flags.contiguous() for flags in (mask, reset))
    y, after = x.new_empty(x.shape), tail.new_empty(tail.shape)
    library.kernel("conv_forward")(
        (
            *library.header(x),
            *x.shape,
            taps.shape[0],
            *(field for rows in (x, y) for field in library.flat_view(rows)),
            *(library.pointer(part) for part in (taps, bias, tail, after, mask, reset)),
        )
    )
    return y, after


def _backward(
    dy: Tensor, dtail: Tensor, x: Tensor, weight: Tensor, tail: Tensor, mask: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, dy, taps = library.rows(x), library.rows(dy), weight.T.contiguous()
    tail, dtail = tail.contiguous(), dtail.contiguous()
    mask, reset = (None if flags is None else flags.contiguous() for flags in (mask, reset))
    (B, T, D), K = x.shape, taps.shape[0]
    dx, before = x.new_empty(x.shape), tail.new_empty(tail.shape)
    dtaps, dbias = x.new_empty((B, K, D)), x.new_empty((B, D))
    library.kernel("conv_backward")(
        (
            *library.header(x),
            B,
            T,
            D,
            K,
            *(field for rows in (x, dy, dx) for field in library.flat_view(rows)),
            *(library.pointer(part) for part in (taps, tail, dtail, dtaps, dbias, before, mask, reset)),
        )
    )
    return dx, dtaps.sum(0).T.contiguous(), dbias.sum(0), before


torch.library.impl("latte::causal_conv", "CPU", _forward)
torch.library.impl("latte::causal_conv_backward", "CPU", _backward)


@torch.library.register_fake("latte::causal_conv")
def _(x: Tensor, weight: Tensor, bias: Tensor, tail: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), tail.new_empty(tail.shape)


@torch.library.register_fake("latte::causal_conv_backward")
def _(
    dy: Tensor, dtail: Tensor, x: Tensor, weight: Tensor, tail: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        weight.new_empty(weight.shape),
        weight.new_empty(x.shape[2]),
        tail.new_empty(tail.shape),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, weight, _, *rest = inputs
    ctx.save_for_backward(x, weight, *rest)


def _gradients(ctx: Any, dy: Tensor, dtail: Tensor) -> tuple[Tensor | None, ...]:
    return (*torch.ops.latte.causal_conv_backward(dy, dtail, *ctx.saved_tensors), None, None)


library.register_gradients("causal_conv", _gradients, _save)
