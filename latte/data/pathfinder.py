"""Pathfinder: two dashed contours among distractors; are the two marked ends those of one contour?

After the generator of Linsley et al. and Kim et al. as the Long Range Arena uses it. Every image is a function of the
seed and its number, by raw numbers of Philox, so it is the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from latte.data.strokes import Stamp, dash, disc, disc_offsets

COLLISION = 1.8  # of two soft masks where they overlap
TRIES, DISTRACTOR_TRIES = 3, 5


@dataclass(frozen=True)
class Pathfinder:
    """Sizes in pixels; the numbers are those of the Long Range Arena."""

    side: int
    margins: tuple[int, ...]  # gaps between dashes, one drawn for each image
    dash: int  # length
    thickness: float
    marker_radius: float
    seed_distance: int
    continuity: float  # how straight contours are: larger is straighter
    contour: int  # dashes of each of the two contours
    distractors: int
    distractor: int  # dashes of a distractor
    target_contrast: float
    distractor_contrast: float
    padding: int = 1
    antialias: int = 2


#: Pathfinder-32 "hard", and Path-X.
SIZES = {
    32: Pathfinder(32, (1,), 2, 0.5, 1.5, 7, 1.0, 14, 5, 4, 1.5, 2.0),
    128: Pathfinder(128, (2, 3), 5, 1.5, 3.0, 20, 1.8, 14, 8, 4, 0.675, 0.9),
}


class _Failed(Exception):  # noqa: N818  (never leaves this file)
    """A dash that finds no place."""


class _Draws:
    """Uniform numbers of one image."""

    def __init__(self, seed: int, number: int) -> None:
        self.philox = np.random.Philox(key=[seed, number])
        self.left: list[int] = []

    def below(self, count: int) -> int:
        return (self._raw() >> 32) * count >> 32

    def uniform(self) -> float:
        return (self._raw() >> 11) * 2.0**-53

    def _raw(self) -> int:
        if not self.left:
            self.left = self.philox.random_raw(512).tolist()
        return self.left.pop()


@dataclass
class _Snake:
    """A contour that grows: its pivot and direction, what it has drawn, and the mask of its last dash."""

    tail: tuple[int, int]
    head: tuple[int, int]
    pivot: tuple[int, int]
    angle: float
    last: tuple[Stamp, tuple[int, int]]


def pathfinder_image(settings: Pathfinder, seed: int, number: int) -> tuple[np.ndarray, int]:
    """Pixels (side, side) from 0 to 255, and 1 if the marked ends are of one contour, else 0."""
    draws = _Draws(seed, number)
    label = draws.below(2)
    margin = settings.margins[draws.below(len(settings.margins))]
    while True:
        canvas = _Canvas(settings, margin, draws)
        try:
            snakes = canvas.pair()
            for _ in range(settings.contour - 1):
                for own, other in (snakes, snakes[::-1]):
                    canvas.extend(own, settings.target_contrast, other)
            break
        except _Failed:
            continue
    for snake in snakes:
        canvas.merge(*snake.last)
    for _ in range(settings.distractors):
        canvas.distract()
    first = draws.below(2)
    second = first if label else 1 - first
    canvas.mark(snakes[first].tail)
    canvas.mark(snakes[second].head)
    return canvas.pixels(), label


def pathfinder_images(
    settings: Pathfinder, seed: int, first: int, count: int, progress: Callable[[], None] = lambda: None
) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, side, side) and labels of the numbers from ``first``."""
    images, labels = np.empty((count, settings.side, settings.side), np.uint8), np.empty(count, np.int64)
    for index in range(count):
        images[index], labels[index] = pathfinder_image(settings, seed, first + index)
        progress()
    return images, labels


class _Canvas:
    """An image with its mask; both have a frame, so that a dash at the border needs no clipping."""

    def __init__(self, settings: Pathfinder, margin: int, draws: _Draws) -> None:
        self.settings, self.margin, self.draws = settings, margin, draws
        self.frame = settings.dash + math.ceil(settings.thickness) + margin + 1
        wide = settings.side + 2 * self.frame
        self.image, self.mask = np.zeros((wide, wide)), np.ones((wide, wide))
        inside = slice(self.frame + settings.padding, wide - self.frame - settings.padding)
        self.mask[inside, inside] = 0

    def pair(self) -> tuple[_Snake, _Snake]:
        """Two contours of one dash each, whose tails have a fixed distance."""
        settings, side = self.settings, self.settings.side
        degrees, border = self.draws.below(360), 2 * settings.seed_distance
        free = self.free(degrees)
        inner = np.zeros_like(free)
        inner[border : side - border, border : side - border] = True
        first = self.seed(self.place(free & inner), degrees, settings.target_contrast)
        self.merge(*first.last)
        for _ in range(TRIES):
            turn, degrees = 2 * math.pi * self.draws.uniform(), self.draws.below(360)
            y = first.tail[0] + round(settings.seed_distance * math.sin(turn))
            x = first.tail[1] + round(settings.seed_distance * math.cos(turn))
            if 0 <= y < side and 0 <= x < side and self.free(degrees)[y, x]:
                return first, self.seed((y, x), degrees, settings.target_contrast)
        raise _Failed

    def distract(self) -> None:
        """A short contour anywhere; after a few tries, none."""
        for _ in range(DISTRACTOR_TRIES):
            kept = self.image.copy(), self.mask.copy()
            try:
                degrees = self.draws.below(360)
                snake = self.seed(self.place(self.free(degrees)), degrees, self.settings.distractor_contrast)
                for _ in range(self.settings.distractor - 1):
                    self.extend(snake, self.settings.distractor_contrast)
                self.merge(*snake.last)
                return
            except _Failed:
                self.image, self.mask = kept

    def free(self, degrees: int) -> np.ndarray:
        """Where (side, side) a dash of this direction may have its tail without touching what is masked."""
        side, frame = self.settings.side, self.frame
        blocked, taken = np.zeros((side, side), bool), self.mask > 0.3
        for dy, dx in self.dash(degrees).covered:
            blocked |= taken[frame + dy : frame + dy + side, frame + dx : frame + dx + side]
        return ~blocked

    def place(self, free: np.ndarray) -> tuple[int, int]:
        places = np.flatnonzero(free)
        if not len(places):
            raise _Failed
        y, x = divmod(int(places[self.draws.below(len(places))]), self.settings.side)
        return y, x

    def seed(self, tail: tuple[int, int], degrees: int, contrast: float) -> _Snake:
        """The first dash of a contour, drawn."""
        angle, stamp = math.radians(degrees), self.dash(degrees)
        head = _moved(tail, angle, self.settings.dash)
        pivot = _moved(head, angle, -(self.settings.dash + self.margin))
        self.draw(stamp, tail, contrast)
        return _Snake(tail, head, pivot, angle, (stamp, tail))

    def extend(self, snake: _Snake, contrast: float, other: _Snake | None = None) -> None:
        """One more dash, in a direction that is more probable the straighter it goes on."""
        settings, radius = self.settings, self.settings.dash + self.margin
        pivot = _moved(snake.pivot, snake.angle, radius + self.margin)
        offsets, angles = _circle(radius)
        ys, xs = offsets[:, 0] + pivot[0] + self.frame, offsets[:, 1] + pivot[1] + self.frame
        if ys.min() < 1 or xs.min() < 1 or max(ys.max(), xs.max()) >= len(self.mask) - 1:
            raise _Failed
        near = disc_offsets(self.margin)
        ys_near, xs_near = ys[:, None] + near[:, 0], xs[:, None] + near[:, 1]
        wide = len(self.mask) - 1
        covered = self.mask[ys_near.clip(0, wide), xs_near.clip(0, wide)].max(axis=1)
        turned = np.abs((angles - snake.angle + math.pi) % (2 * math.pi) - math.pi)
        bend = np.maximum(0.0, np.cos(np.minimum(settings.continuity * turned, math.pi / 2)))
        weights = np.cumsum((1 - covered) * bend * bend)
        if weights[-1] <= 1e-9:
            raise _Failed
        for _ in range(TRIES):
            chosen = min(int(np.searchsorted(weights, weights[-1] * self.draws.uniform(), "right")), len(weights) - 1)
            head = pivot[0] + int(offsets[chosen, 0]), pivot[1] + int(offsets[chosen, 1])
            stamp = self.dash_of(float(angles[chosen]) + math.pi)
            if self.fits(stamp, head, other):
                self.merge(*snake.last)
                self.draw(stamp, head, contrast)
                snake.head, snake.pivot, snake.angle = head, pivot, float(angles[chosen])
                snake.last = (stamp, head)
                return
        raise _Failed

    def fits(self, stamp: Stamp, place: tuple[int, int], other: _Snake | None) -> bool:
        """Whether a dash touches nothing but its own contour's last dash."""
        window = self._window(stamp, place)
        if window[0].start < 0 or window[1].start < 0 or max(window[0].stop, window[1].stop) > len(self.mask):
            return False
        taken = self.mask[window]
        if other is not None:
            taken = np.maximum(taken, other.last[0].mask_at(place[0] - other.last[1][0], place[1] - other.last[1][1]))
        return float((taken + stamp.mask).max()) < COLLISION

    def draw(self, stamp: Stamp, place: tuple[int, int], contrast: float) -> None:
        window = self._window(stamp, place)
        np.maximum(self.image[window], contrast * stamp.light, out=self.image[window])

    def merge(self, stamp: Stamp, place: tuple[int, int]) -> None:
        window = self._window(stamp, place)
        np.maximum(self.mask[window], stamp.mask, out=self.mask[window])

    def mark(self, place: tuple[int, int]) -> None:
        light = disc(self.settings.marker_radius)
        half = len(light) // 2
        y, x = place[0] + self.frame - half, place[1] + self.frame - half
        top, left = max(0, -y), max(0, -x)
        light = light[top:, left:]
        window = self.image[y + top : y + top + len(light), x + left : x + left + light.shape[1]]
        np.maximum(window, light[: window.shape[0], : window.shape[1]], out=window)

    def pixels(self) -> np.ndarray:
        """The image without its frame, stretched to 0 to 255."""
        inner = self.image[self.frame : -self.frame, self.frame : -self.frame]
        low, high = float(inner.min()), float(inner.max())
        return np.floor((inner - low) * (255 / (high - low)) + 0.5 + 1e-9).astype(np.uint8)

    def dash(self, degrees: int) -> Stamp:
        return self.dash_of(math.radians(degrees))

    def dash_of(self, angle: float) -> Stamp:
        settings = self.settings
        return dash(round(angle, 6), settings.dash, settings.thickness, self.margin, settings.antialias)

    def _window(self, stamp: Stamp, place: tuple[int, int]) -> tuple[slice, slice]:
        y, x = place[0] + self.frame - stamp.half, place[1] + self.frame - stamp.half
        return slice(y, y + 2 * stamp.half + 1), slice(x, x + 2 * stamp.half + 1)


def _moved(place: tuple[int, int], angle: float, distance: float) -> tuple[int, int]:
    """Rounded up, as in the original; a hair less, so that rounding errors of sines never decide."""
    return (
        math.ceil(place[0] + distance * math.sin(angle) - 1e-9),
        math.ceil(place[1] + distance * math.cos(angle) - 1e-9),
    )


@lru_cache
def _circle(radius: int) -> tuple[np.ndarray, np.ndarray]:
    """Different whole points (y, x) on a circle, and the angle of each."""
    points = sorted(
        {
            (round(radius * math.sin(math.radians(turn))), round(radius * math.cos(math.radians(turn))))
            for turn in range(360)
        }
    )
    return np.array(points), np.array([math.atan2(y, x) for y, x in points])
