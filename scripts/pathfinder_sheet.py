"""Draw the contact sheet of Pathfinder in the docs: ``python scripts/pathfinder_sheet.py docs/pathfinder.png``."""

from __future__ import annotations

import sys

import numpy as np
from matplotlib.figure import Figure

from latte.data.pathfinder import SIZES, pathfinder_images


def main(path: str) -> None:
    """Images of the 32 × 32 task above, of the 128 × 128 one below, with their labels."""
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    rows = figure.subfigures(2, 1, height_ratios=(1.35, 1))
    for part, side, shape in ((rows[0], 32, (3, 10)), (rows[1], 128, (1, 4))):
        images, labels = pathfinder_images(SIZES[side], seed=0, first=0, count=int(np.prod(shape)))
        for axis, image, label in zip(part.subplots(*shape).flat, images, labels, strict=True):
            axis.imshow(image, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            axis.set_axis_off()
            axis.set_title("one contour" if label else "two", fontsize=7, pad=2)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1])
