"""Rotary position encoding: queries and keys turned by their place, so that products see only distances."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from latte.ops.pointwise import rotate_pairs

_TABLES: dict[tuple, tuple[Tensor, Tensor]] = {}


@dataclass(frozen=True)
class Rotary:
    """Turns channel pairs (i, i + K/2) by place x frequency_i; some pretrained models also stretch them.

    Places below ``rounded_below`` have angles rounded to float32, as the pretrained model knows them.
    """

    frequencies: tuple[float, ...]
    stretch: float = 1.0
    rounded_below: int = 0

    def turn(self, x_BTHK: Tensor, place_BT: Tensor) -> Tensor:
        """Each token by its place."""
        return rotate_pairs(x_BTHK, *self._angles(place_BT, x_BTHK.dtype))

    def turn_from_start(self, x_BTHK: Tensor) -> Tensor:
        """As :meth:`turn` for places 0, 1, 2, ..., from a table that is kept: the common case of training."""
        T, device = x_BTHK.shape[1], x_BTHK.device
        if torch.compiler.is_compiling():
            return self.turn(x_BTHK, torch.arange(T, device=device)[None])
        key = (self, device, x_BTHK.dtype)
        table = _TABLES.get(key)
        if table is None or table[0].shape[1] < T:
            table = self._angles(torch.arange(max(T, 1024), device=device)[None], x_BTHK.dtype)
            _TABLES[key] = table
        return rotate_pairs(x_BTHK, table[0][:, :T], table[1][:, :T])

    def _angles(self, place_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # In float64: at place 10^6 a float32 angle is off by several hundredths of a radian.
        wide = torch.float32 if place_BT.device.type == "mps" else torch.float64
        frequencies_K = torch.tensor(self.frequencies, dtype=wide, device=place_BT.device)
        angle_BTK = place_BT[..., None].to(wide) * frequencies_K
        if self.rounded_below:
            rounded_BTK = (place_BT[..., None].float() * frequencies_K.float()).to(wide)
            angle_BTK = torch.where(place_BT[..., None] < self.rounded_below, rounded_BTK, angle_BTK)
        return (self.stretch * angle_BTK.cos()).to(dtype), (self.stretch * angle_BTK.sin()).to(dtype)


def rotary(width: int, theta: float) -> Rotary:
    """The usual frequencies, 1 / theta^(2i/K)."""
    return Rotary(tuple(theta ** (-i / width) for i in range(0, width, 2)))


def rotate(x_BTHK: Tensor, place_BT: Tensor, theta: float) -> Tensor:
    """Turn channel pairs (i, i + K/2) of each token by place / theta^(2i/K)."""
    return rotary(x_BTHK.shape[-1], theta).turn(x_BTHK, place_BT)


def rotate_from_start(x_BTHK: Tensor, theta: float) -> Tensor:
    """As :func:`rotate` for places 0, 1, 2, ..., from a table that is kept."""
    return rotary(x_BTHK.shape[-1], theta).turn_from_start(x_BTHK)
