"""Arrays that are made once and memory-mapped afterwards, cached by what they are made from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from latte.files import whole_folder

Arrays = dict[str, np.ndarray]


def cached_arrays(folder: Path, build: Callable[[], Arrays], notice: Callable[[], None] = lambda: None) -> Arrays:
    """The arrays of a folder, memory-mapped; ``build`` makes them if they are not there, after a ``notice``."""
    if not is_whole(folder):
        notice()
        with whole_folder(folder) as scratch:
            for name, values in build().items():
                np.save(scratch / f"{name}.npy", values)
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(folder.glob("*.npy"))}


def is_whole(folder: Path) -> bool:
    """Whether every file of a cached folder has its full size, which detects a crash without reading the contents."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        return all((folder / name).stat().st_size == entry["bytes"] for name, entry in manifest["files"].items())
    except (OSError, ValueError, KeyError):
        return False
