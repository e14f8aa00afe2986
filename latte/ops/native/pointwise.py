"""What stands between matrix products, on the CPU: the operators latte::rotate, latte::swiglu and latte::rms_norm."""

import struct
from typing import Any

import torch
from torch import Tensor

from latte.ops.native import library

torch.library.define("latte::rotate", "(Tensor x, Tensor cosine, Tensor sine, bool inverse) -> Tensor")
torch.library.define("latte::swiglu", "(Tensor gate, Tensor up) -> Tensor")
torch.library.define("latte::swiglu_backward", "(Tensor dy, Tensor gate, Tensor up) -> (Tensor, Tensor)")
torch.library.define("latte::rms_norm", "(Tensor x, Tensor weight, float eps) -> Tensor")
torch.library.define("latte::rms_norm_backward", "(Tensor dy, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn channels i and i + K/2 of (B, T, H, K) by the angle of ``cosine`` and ``sine``, (B or 1, T, K / 2).

    No gradient goes to the angles. Raises ValueError on other shapes or dtypes.
    """
    B, T, _, K = x.shape
    library.same_kind(x=x, cosine=cosine, sine=sine)
    if cosine.shape not in ((B, T, K // 2), (1, T, K // 2)) or sine.shape != cosine.shape or K % 2:
        raise ValueError(f"cosine: expected shape {(B, T, K // 2)}, got {tuple(cosine.shape)} and {tuple(sine.shape)}")
    if library.direct(x) and T <= 16:
        return _rotate(x, cosine, sine, False)
    return torch.ops.latte.rotate(x, cosine, sine, False)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Raises ValueError on shapes or dtypes that differ."""
    library.same_kind(gate=gate, up=up)
    library.shape("up", up, *gate.shape)
    if library.direct(gate, up) and gate.numel() <= 1 << 17:
        return _swiglu(gate, up)
    return torch.ops.latte.swiglu(gate, up)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. Raises ValueError on shapes or dtypes that differ."""
    library.same_kind(x=x, weight=weight)
    library.shape("weight", weight, x.shape[-1])
    if library.direct(x, weight) and x.numel() <= 1 << 17:
        return _rms_norm(x, weight, eps)
    return torch.ops.latte.rms_norm(x, weight, eps)


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor, inverse: bool) -> Tensor:
    x, cosine, sine = library.rows(x), cosine.contiguous(), sine.contiguous()
    y = x.new_empty(x.shape)
    table_stride = cosine.stride(0) if cosine.shape[0] > 1 else 0
    library.kernel("rotate")(
        (
            *library.header(x),
            *x.shape,
            int(inverse),
            table_stride,
            *library.view(x),
            *library.view(y),
            cosine.data_ptr(),
            sine.data_ptr(),
        )
    )
    return y


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y = gate.new_empty(gate.shape)
    pointers = (x.data_ptr() for x in (gate, up, y))
    library.kernel("swiglu_forward")((*library.header(gate), gate.numel(), *pointers))
    return y


def _swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up, dy = gate.contiguous(), up.contiguous(), dy.contiguous()
    dgate, dup = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    pointers = (x.data_ptr() for x in (gate, up, dy, dgate, dup))
    library.kernel("swiglu_backward")((*library.header(gate), gate.numel(), *pointers))
    return dgate, dup


def _bits(eps: float) -> int:
    return struct.unpack("q", struct.pack("d", eps))[0]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x, weight = x.contiguous(), weight.contiguous()
    y = x.new_empty(x.shape)
    D = weight.shape[0]
    pointers = (tensor.data_ptr() for tensor in (x, weight, y))
    library.kernel("norm_forward")((*library.header(x), x.numel() // D, D, _bits(eps), *pointers))
    return y


def _rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, weight, dy = x.contiguous(), weight.contiguous(), dy.contiguous()
    dx, dweight = x.new_empty(x.shape), weight.new_empty(weight.shape)
    D = weight.shape[0]
    pointers = (tensor.data_ptr() for tensor in (x, weight, dy, dx, dweight))
    library.kernel("norm_backward")((*library.header(x), x.numel() // D, D, _bits(eps), *pointers))
    return dx, dweight


for _name, _function in (
    ("rotate", _rotate),
    ("swiglu", _swiglu),
    ("swiglu_backward", _swiglu_backward),
    ("rms_norm", _rms_norm),
    ("rms_norm_backward", _rms_norm_backward),
):
    torch.library.impl(f"latte::{_name}", "CPU", _function)


@torch.library.register_fake("latte::rotate")
@torch.library.register_fake("latte::swiglu")
@torch.library.register_fake("latte::rms_norm")
def _(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("latte::swiglu_backward")
@torch.library.register_fake("latte::rms_norm_backward")
def _(dy: Tensor, x: Tensor, other: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), other.new_empty(other.shape)


def _save_angles(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, cosine, sine, ctx.inverse = inputs
    ctx.save_for_backward(cosine, sine)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.rest = inputs[2:]


def _rotate_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return torch.ops.latte.rotate(dy, *ctx.saved_tensors, not ctx.inverse), None, None, None


def _swiglu_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
    return torch.ops.latte.swiglu_backward(dy, *ctx.saved_tensors)


def _norm_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return (*torch.ops.latte.rms_norm_backward(dy, *ctx.saved_tensors, *ctx.rest), None)


torch.library.register_autograd("latte::rotate", _rotate_gradients, setup_context=_save_angles)
library.register_gradients("swiglu", _swiglu_gradients, _save)
library.register_gradients("rms_norm", _norm_gradients, _save)
