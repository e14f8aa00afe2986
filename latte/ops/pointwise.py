"""What stands between the matrix products of a layer, token by token: rotary encoding, SwiGLU and RMS norm.

In torch each is several passes over memory; where a native kernel serves, one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops import native
from latte.ops.registry import Draw, Example, operation


def _rotate(x_BTHK: Tensor, cosine_BTK: Tensor, sine_BTK: Tensor) -> Tensor:
    first, second = x_BTHK.chunk(2, dim=-1)
    cosine, sine = cosine_BTK[:, :, None], sine_BTK[:, :, None]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def _rotate_example(draw: Draw) -> Example:
    angle = draw.normal(1, draw.T, 8)
    return (draw.normal(draw.B, draw.T, 4, 16), angle.cos(), angle.sin()), {}


@operation(reference=_rotate, native=native.rotate, example=_rotate_example, autocast=True)
def rotate_pairs(x_BTHK: Tensor, cosine_BTK: Tensor, sine_BTK: Tensor) -> tuple[Any, ...]:
    """Turn channels i and i + K/2 of each head by its token's angle; angles (B or 1, T, K/2) get no gradient."""
    return x_BTHK, cosine_BTK, sine_BTK


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _swiglu_example(draw: Draw) -> Example:
    return (draw.normal(draw.B, draw.T, 16), draw.normal(draw.B, draw.T, 16)), {}


@operation(reference=_swiglu, native=native.swiglu, example=_swiglu_example, autocast=True)
def swiglu(gate: Tensor, up: Tensor) -> tuple[Any, ...]:
    """silu(gate) . up."""
    return gate, up


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)


def _native_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return native.rms_norm(x, weight, eps) if x.dtype == weight.dtype else _rms_norm(x, weight, eps)


def _norm_example(draw: Draw) -> Example:
    return (draw.normal(draw.B, draw.T, 16), draw.normal(16)), {"eps": 1e-6}


@operation(reference=_rms_norm, native=_native_rms_norm, example=_norm_example, autocast=True)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Any, ...]:
    """x / sqrt(mean(x^2) + eps) . weight over the last axis, computed in float32 or better."""
    return x, weight, eps
