"""Small anti-aliased images of dashes and discs, for Pathfinder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

FINE = 8  # points a pixel has along each axis where a disc is measured


@dataclass(frozen=True)
class Stamp:
    """A dash that begins in the middle: its light, and the mask of what must stay free around it."""

    light: np.ndarray
    mask: np.ndarray

    @property
    def half(self) -> int:
        return len(self.light) // 2

    @cached_property
    def covered(self) -> list[tuple[int, int]]:
        """Offsets (y, x) from its beginning that the mask covers."""
        ys, xs = np.nonzero(self.mask > 0.3)
        return [(int(y) - self.half, int(x) - self.half) for y, x in zip(ys, xs, strict=True)]

    def mask_at(self, dy: int, dx: int) -> np.ndarray:
        """The mask as a stamp of the same size sees it whose beginning is (dy, dx) away."""
        size = len(self.mask)
        seen = np.zeros_like(self.mask)
        if abs(dy) < size and abs(dx) < size:
            rows, columns = slice(max(0, dy), size + min(0, dy)), slice(max(0, dx), size + min(0, dx))
            seen[max(0, -dy) : size - max(0, dy), max(0, -dx) : size - max(0, dx)] = self.mask[rows, columns]
        return seen


@lru_cache(maxsize=4096)
def dash(angle: float, length: int, thickness: float, margin: int, antialias: int) -> Stamp:
    """A line drawn ``antialias`` times as large and shrunk by Lanczos; its mask is wider by ``margin``."""
    half = length + math.ceil(thickness) + margin
    centre, wide = half * antialias, 2 * half * antialias + 1
    end_y = math.ceil(centre + length * antialias * math.sin(angle) - 1e-9)
    end_x = math.ceil(centre + length * antialias * math.cos(angle) - 1e-9)
    ys, xs = np.mgrid[:wide, :wide] - centre
    along = np.clip((ys * (end_y - centre) + xs * (end_x - centre)) / _square(end_y - centre, end_x - centre), 0, 1)
    off = np.hypot(ys - along * (end_y - centre), xs - along * (end_x - centre))
    line = (off <= max(1.0, round(thickness * antialias)) / 2 + 1e-9).astype(np.float64)
    grown = (off <= max(1.0, round(thickness * antialias)) / 2 + margin * antialias + 1e-9).astype(np.float64)
    return Stamp(shrink(line, 2 * half + 1), shrink(grown, 2 * half + 1))


def disc_offsets(radius: int) -> np.ndarray:
    """Offsets (n, 2) of the whole points of a disc."""
    span = range(-radius, radius + 1)
    return np.array([(y, x) for y in span for x in span if y * y + x * x <= radius * radius])


@lru_cache
def disc(radius: float) -> np.ndarray:
    """The share of each pixel that lies in a disc around the middle."""
    half = math.ceil(radius)
    points = (np.arange((2 * half + 1) * FINE) + 0.5) / FINE - half - 0.5
    inside = points[:, None] ** 2 + points**2 <= radius * radius
    return inside.reshape(2 * half + 1, FINE, 2 * half + 1, FINE).mean(axis=(1, 3))


def shrink(image: np.ndarray, size: int) -> np.ndarray:
    """A square image in another size by Lanczos with three lobes, as shares of 255: rounded as images of bytes are."""
    weights = _lanczos(len(image), size)
    return np.floor(np.clip(weights @ image @ weights.T, 0, 1) * 255 + 0.5 + 1e-9) / 255


@lru_cache
def _lanczos(before: int, after: int) -> np.ndarray:
    """Weights (after, before) of the old pixels for each new one."""
    scale = before / after
    distance = (np.arange(before) + 0.5 - (np.arange(after)[:, None] + 0.5) * scale) / max(1.0, scale)
    weights = np.where(np.abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0)
    return weights / weights.sum(axis=1, keepdims=True)


def _square(y: int, x: int) -> int:
    return max(1, y * y + x * x)
