"""What the machine can do at most, as calls to be timed in turns with what is measured against it.

On a shared machine its speed moves by a third within minutes: a peak that was taken at the start of a run says little
about a layer that is timed ten minutes later. A yardstick does as much as the call beside it, and takes about as long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.bench.figures import Contender
from latte.bench.harness import Call
from latte.ops.product import project

SQUARE, TALL, FASTEST = "square matrix products alone", "tall matrix products alone", "tall products as in our layers"
SUM, PRODUCT = "adding up as many bytes", "one product with as many bytes"


def products(flops: Callable[[int], float], size: int = 2048) -> list[Contender]:
    """Float32 matrix products of about ``flops(length)``: of squares, and shaped like a layer's projections.

    The first two by torch's own product, the peak that shares are of; the last by the product of our own layers, which
    calls a faster library on some processors.
    """
    return [
        _repeated(SQUARE, flops, size, size, size, F.linear),
        _repeated(TALL, flops, 2 * size, size // 4, size, F.linear),
        replace(_repeated(FASTEST, flops, 2 * size, size // 4, size, project), ours=True),
    ]


def _repeated(
    name: str,
    flops: Callable[[int], float],
    rows: int,
    inner: int,
    columns: int,
    product: Callable[[Tensor, Tensor], Tensor],
) -> Contender:
    once = 2.0 * rows * inner * columns

    def times(length: int) -> int:
        return max(1, round(flops(length) / once))

    def prepare(length: int) -> Call:
        left, right = torch.randn(rows, inner), torch.randn(columns, inner)

        def call() -> None:
            for _ in range(times(length)):
                product(left, right)

        return call

    return Contender(name, prepare, flops=lambda length: times(length) * once)


def reads(bytes_once: float, times: int) -> list[Contender]:
    """Reading float32 numbers of ``bytes_once`` from memory, ``times`` times: added up, and in a product with a row."""
    width = 2048
    matrix = torch.ones(max(1, int(bytes_once / 4 / width)), width)
    row = torch.randn(1, width)

    def adding(_: int) -> Call:
        return lambda: [matrix.sum() for _ in range(times)]

    def multiplying(_: int) -> Call:
        # What decoding does with weights: every number read once.
        return lambda: [F.linear(row, matrix) for _ in range(times)]

    total = 4.0 * matrix.numel() * times
    return [
        Contender(name, prepare, bytes=lambda _: total) for name, prepare in ((SUM, adding), (PRODUCT, multiplying))
    ]
