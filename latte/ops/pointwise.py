"""What stands between the matrix products of a layer, token by token: rotary encoding, SwiGLU and RMS norm.

In torch each is several passes over memory; where a native kernel serves, one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops import native
from latte.ops.backends import choose_backend


def rotate_pairs(x_BTHK: Tensor, cosine_BTK: Tensor, sine_BTK: Tensor, backend: str | None = None) -> Tensor:
    """Turn channels i and i + K/2 of each head by its token's angle; angles (B or 1, T, K/2) get no gradient."""
    if choose_backend("rotate", backend, x_BTHK) == "native":
        return native.rotate(x_BTHK, cosine_BTK, sine_BTK)
    first, second = x_BTHK.chunk(2, dim=-1)
    cosine, sine = cosine_BTK[:, :, None], sine_BTK[:, :, None]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def swiglu(gate: Tensor, up: Tensor, backend: str | None = None) -> Tensor:
    """silu(gate) . up."""
    if choose_backend("swiglu", backend, gate) == "native":
        return native.swiglu(gate, up)
    return F.silu(gate) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float, backend: str | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) . weight over the last axis, computed in float32 or better."""
    if x.dtype == weight.dtype and choose_backend("rms_norm", backend, x) == "native":
        return native.rms_norm(x, weight, eps)
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)
