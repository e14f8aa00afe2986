"""Rotary position encoding: queries and keys turned by their place, so that products depend on distances only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from latte.modes import intercepted, transformed
from latte.ops.pointwise import rotate_pairs
from latte.tokens import Tokens

_TABLES: dict[tuple, tuple[Tensor, Tensor]] = {}


@dataclass(frozen=True)
class Rotary:
    """Turns channel pairs (i, i + K/2) by place x frequency_i; some pretrained models also stretch them.

    Places below ``rounded_below`` have angles rounded to float32, as the pretrained model was trained.
    """

    frequencies: tuple[float, ...]
    stretch: float = 1.0
    rounded_below: int = 0

    def turn(self, x_BTHK: Tensor, tokens: Tokens) -> Tensor:
        """Each token by its place."""
        if tokens.from_start and not torch.compiler.is_compiling():
            return rotate_pairs(x_BTHK, *self._table(tokens.length, x_BTHK))
        angles = tokens.shared(("rotary", self, x_BTHK.dtype), lambda: self._angles(tokens.place_BT, x_BTHK.dtype))
        return rotate_pairs(x_BTHK, *angles)

    def turn_to(self, x_BTHK: Tensor, place_BT: Tensor) -> Tensor:
        """Each token by a given place instead of its own."""
        return rotate_pairs(x_BTHK, *self._angles(place_BT, x_BTHK.dtype))

    def turn_back(self, x_BTHK: Tensor, place_BTH: Tensor) -> Tensor:
        """Heads of tokens that were turned by their places, as they are at place 0."""
        cosine, sine = self._angles(place_BTH.flatten(1), x_BTHK.dtype)
        # Turned by the opposite angle; it was stretched once already.
        turned = rotate_pairs(x_BTHK.flatten(1, 2)[:, :, None], cosine / self.stretch**2, -sine / self.stretch**2)
        return self.stretch * turned.view_as(x_BTHK)

    def _table(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Angles of places 0, 1, 2, ... from a table that is kept between calls: the common case of training."""
        if intercepted() or transformed() or type(like) is not Tensor:  # what is made now must not be kept
            return self._angles(torch.arange(length, device=like.device)[None], like.dtype)
        key = (self, like.device, like.dtype)
        table = _TABLES.get(key)
        if table is None or table[0].shape[1] < length:
            with torch.inference_mode(False), torch.no_grad():  # else training could not use it afterwards
                table = self._angles(torch.arange(max(length, 1024), device=like.device)[None], like.dtype)
            _TABLES[key] = table
        return table[0][:, :length], table[1][:, :length]

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
