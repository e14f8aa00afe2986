"""Rotary position encoding: queries and keys turned by their place, so that products see only distances."""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.pointwise import rotate_pairs

_TABLES: dict[tuple, tuple[Tensor, Tensor]] = {}


def rotate(x_BTHK: Tensor, place_BT: Tensor, theta: float) -> Tensor:
    """Turn channel pairs (i, i + K/2) of each token by place / theta^(2i/K)."""
    return rotate_pairs(x_BTHK, *_angles(place_BT, x_BTHK.shape[-1], theta, x_BTHK.dtype))


def rotate_from_start(x_BTHK: Tensor, theta: float) -> Tensor:
    """As :func:`rotate` for places 0, 1, 2, ..., from a table that is kept: the common case of training."""
    T, K, device = x_BTHK.shape[1], x_BTHK.shape[-1], x_BTHK.device
    if torch.compiler.is_compiling():
        return rotate(x_BTHK, torch.arange(T, device=device)[None], theta)
    key = (K, theta, device, x_BTHK.dtype)
    table = _TABLES.get(key)
    if table is None or table[0].shape[1] < T:
        table = _angles(torch.arange(max(T, 1024), device=device)[None], K, theta, x_BTHK.dtype)
        _TABLES[key] = table
    return rotate_pairs(x_BTHK, table[0][:, :T], table[1][:, :T])


def _angles(place_BT: Tensor, width: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    # In float64: at place 10^6 a float32 angle is off by several hundredths of a radian.
    wide = torch.float32 if place_BT.device.type == "mps" else torch.float64
    exponent = torch.arange(0, width, 2, dtype=wide, device=place_BT.device) / width
    angle_BTK = place_BT[..., None].to(wide) * theta**-exponent
    return angle_BTK.cos().to(dtype), angle_BTK.sin().to(dtype)
