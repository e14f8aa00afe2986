"""Weights of 4 to 8 bits in blocks, in the formats of GGUF files; activations stay floats.

A weight is scale x number (+ minimum). Q8_0 and Q4_1, blocks of 32 with a scale in half precision, are what models are
quantised to here; Q4_0, Q4_K and Q6_K are read only. Rows are whole blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.native.blocks import block_product, unpack_blocks
from latte.ops.native.library import direct
from latte.ops.registry import kernels_serve


class BlockFormat(NamedTuple):
    """Numbers and bytes of a block."""

    numbers: int
    bytes: int

    def row_bytes(self, columns: int) -> int:
        return columns // self.numbers * self.bytes


FORMATS = {
    "Q8_0": BlockFormat(32, 34),
    "Q4_0": BlockFormat(32, 18),
    "Q4_1": BlockFormat(32, 20),
    "Q4_K": BlockFormat(256, 144),
    "Q6_K": BlockFormat(256, 210),
}
#: Shares of the full range that a scale is tried with: losing the extremes can make the others more exact.
SHRUNK = torch.linspace(1.0, 0.8, 11)


def pack(weight: Tensor, kind: str) -> Tensor:
    """A matrix (rows, columns) in blocks of Q8_0 or Q4_1: (rows, bytes) uint8.

    Raises:
        ValueError: columns that are no whole blocks, another format, or numbers that are not finite.
    """
    if kind not in ("Q8_0", "Q4_1"):
        raise ValueError(f"weights can't be written as {kind}, expected Q8_0 or Q4_1")
    rows, columns = weight.shape
    if columns % 32:
        raise ValueError(f"a matrix has {columns} columns, expected a multiple of 32 for blocks")
    if not torch.isfinite(weight).all():
        raise ValueError("a weight is NaN or infinite, expected finite numbers to quantise")
    x = weight.detach().to("cpu", torch.float32).view(rows, -1, 32)
    blocks = _pack_8(x) if kind == "Q8_0" else _pack_4(x)
    return blocks.reshape(rows, -1).contiguous()


def _pack_8(x_RB32: Tensor) -> Tensor:
    scale = (x_RB32.abs().amax(-1, keepdim=True) / 127).to(torch.float16)
    number = _divide(x_RB32, scale.float()).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), number.view(torch.uint8)], dim=-1)


def _pack_4(x_RB32: Tensor) -> Tensor:
    low, high = x_RB32.amin(-1, keepdim=True), x_RB32.amax(-1, keepdim=True)
    best = None
    for share in SHRUNK.tolist():
        middle, half = (low + high) / 2, (high - low) / 2 * share
        scale, least = (2 * half / 15).to(torch.float16), (middle - half).to(torch.float16)
        number = _divide(x_RB32 - least.float(), scale.float()).round().clamp(0, 15)
        error = (number * scale.float() + least.float() - x_RB32).square().sum(-1, keepdim=True)
        if best is None:
            best = (error, scale, least, number)
        else:
            better = error < best[0]
            best = (
                torch.where(better, error, best[0]),
                torch.where(better, scale, best[1]),
                torch.where(better, least, best[2]),
                torch.where(better, number, best[3]),
            )
    assert best is not None
    _, scale, least, number = best
    number = number.to(torch.uint8)
    packed = number[..., :16] | (number[..., 16:] << 4)
    return torch.cat([scale.view(torch.uint8), least.view(torch.uint8), packed], dim=-1)


def _divide(x: Tensor, scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.zeros_like(x), x / torch.where(scale == 0, 1, scale))


def unpack(blocks: Tensor, kind: str, columns: int) -> Tensor:
    """Blocks (rows, bytes) as a matrix (rows, columns) in float32."""
    if kernels_serve(torch.empty(0)) and blocks.device.type == "cpu" and blocks.is_contiguous():
        return unpack_blocks(blocks, kind, columns)
    known = FORMATS[kind]
    return _UNPACK[kind](blocks.reshape(-1, known.bytes)).view(blocks.shape[0], columns)


def block_linear(x: Tensor, blocks: Tensor, kind: str, bias: Tensor | None = None) -> Tensor:
    """x (..., columns) times the transpose of a matrix in blocks, plus a bias.

    On the CPU without gradients blocks become floats in the cache, a few rows at a time; otherwise all of them at once.
    """
    plain = not torch.is_autocast_enabled(x.device.type) and x.dtype == torch.float32 and blocks.is_contiguous()
    if plain and x.device.type == "cpu" and direct(x, bias) and kernels_serve(x):
        floats = None if bias is None else bias.float()
        return block_product(x.reshape(-1, x.shape[-1]), blocks, kind, floats).view(*x.shape[:-1], blocks.shape[0])
    weight = unpack(blocks, kind, x.shape[-1]).to(x.dtype)
    return F.linear(x, weight, None if bias is None else bias.to(x.dtype))


def _halves(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.float16).float()


def _unpack_8_0(x: Tensor) -> Tensor:
    return _halves(x[:, :2]) * x[:, 2:].contiguous().view(torch.int8).float()


def _nibbles(x: Tensor) -> Tensor:
    return torch.cat([x & 15, x >> 4], dim=-1).float()


def _unpack_4_0(x: Tensor) -> Tensor:
    return _halves(x[:, :2]) * (_nibbles(x[:, 2:]) - 8)


def _unpack_4_1(x: Tensor) -> Tensor:
    return _halves(x[:, :2]) * _nibbles(x[:, 4:]) + _halves(x[:, 2:4])


def _unpack_4_k(x: Tensor) -> Tensor:
    scale, least = _halves(x[:, :2]), _halves(x[:, 2:4])
    first, second, third = x[:, 4:8], x[:, 8:12], x[:, 12:16]
    scales = torch.cat([first & 63, (third & 15) | (first >> 6 << 4)], dim=1)
    minimums = torch.cat([second & 63, (third >> 4) | (second >> 6 << 4)], dim=1)
    packed = x[:, 16:].view(-1, 4, 1, 32)
    number = torch.cat([packed & 15, packed >> 4], dim=2).view(-1, 8, 32).float()
    return ((scale * scales.float())[..., None] * number - (least * minimums.float())[..., None]).flatten(1)


def _unpack_6_k(x: Tensor) -> Tensor:
    low, high = x[:, :128].view(-1, 2, 1, 2, 32), x[:, 128:192].view(-1, 2, 1, 32)
    scales, scale = x[:, 192:208].contiguous().view(torch.int8).float(), _halves(x[:, 208:])
    fours = torch.cat([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32)
    twos = torch.cat([(high >> shift) & 3 for shift in (0, 2, 4, 6)], dim=2)
    number = (fours | (twos << 4)).float().view(-1, 16, 16) - 32
    return ((scale * scales)[..., None] * number).flatten(1)


_UNPACK = {
    "Q8_0": _unpack_8_0,
    "Q4_0": _unpack_4_0,
    "Q4_1": _unpack_4_1,
    "Q4_K": _unpack_4_k,
    "Q6_K": _unpack_6_k,
}
__all__ = ["FORMATS", "BlockFormat", "block_linear", "pack", "unpack"]
