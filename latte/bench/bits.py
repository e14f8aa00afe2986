"""How fast weights are read at 32, 8 and 4 bits: one product of a row with a matrix far larger than the caches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from latte.bench import yardsticks
from latte.bench.figures import Contender, Figure, Plan, sweep
from latte.bench.harness import Call
from latte.bench.machine import Peaks
from latte.ops import native
from latte.ops.blocks import FORMATS, block_linear, pack
from latte.ops.product import project

COLUMNS = 576  # as in SmolLM2
BITS = {32: None, 8: "Q8_0", 4: "Q4_1"}


def run(plan: Plan, peaks: Peaks) -> list[Figure]:
    """Shares of plain reading of as many bytes, in turns; the length of a figure is its number of bits."""
    if not native.available():
        return []
    megabytes = 8 if plan.repeats <= 2 else 96
    figures = []
    for bits, kind in BITS.items():
        row = 4 * COLUMNS if kind is None else FORMATS[kind].row_bytes(COLUMNS)
        rows = megabytes * 2**20 // row
        plain = yardsticks.reads(rows * row, 1)
        contender = Contender(name(bits), _product(rows, kind), ours=True, bytes=partial(_size, rows * row))
        figures += sweep("decode", "bits", [contender], plan, peaks, [bits], plain)
    return [figure for figure in figures if figure.ours]


def _size(size: int, _: int) -> float:
    return float(size)


def name(bits: int) -> str:
    return f"weights of {bits} bits"


def _product(rows: int, kind: str | None) -> Callable[[int], Call]:
    def prepare(_: int) -> Call:
        x = torch.randn(1, 1, COLUMNS)
        if kind is None:
            weight = torch.randn(rows, COLUMNS)
            return torch.no_grad()(lambda: project(x, weight))
        few = pack(torch.randn(64, COLUMNS), kind)
        blocks = few.repeat(-(-rows // 64), 1)[:rows].contiguous()
        return torch.no_grad()(lambda: block_linear(x, blocks, kind))

    return prepare
