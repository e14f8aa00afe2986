"""Generated examples with labels: ListOps and Pathfinder, the latter on all cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from latte.data.examples import Examples
from latte.data.listops import listops
from latte.data.pathfinder import SIZES, pathfinder_images

#: Images of one task of a process; fewer in all are drawn in this process.
SHARE = 1000


def generated(kind: str, count: int, seed: int, size: int, say: Callable[[str], None]) -> Examples:
    """``count`` examples of listops or pathfinder; the same for the same seed on every machine."""
    say(f"generating {count:,} examples of {kind}")
    if kind == "listops":
        trees = listops(count, seed)
        return Examples(trees.ids, trees.starts, trees.labels)
    images, labels = _images(count, seed, size)
    starts = np.arange(count + 1, dtype=np.int64) * size * size
    return Examples(images.ravel(), starts, labels)


def _images(count: int, seed: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if count < 2 * SHARE or cores == 1:
        return pathfinder_images(SIZES[size], seed, 0, count)
    firsts = range(0, count, SHARE)
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(_share, [(size, seed, first, min(SHARE, count - first)) for first in firsts]))
    images, labels = zip(*found, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _share(task: tuple[int, int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    size, seed, first, count = task
    return pathfinder_images(SIZES[size], seed, first, count)
