"""Every registered op at the size of its own example, on each backend: how a new op stands before it has peers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from latte.bench.figures import Contender, Figure, Plan, sweep
from latte.bench.harness import Call
from latte.bench.machine import Peaks
from latte.ops.registry import Draw, Op, registered_ops


def run(plan: Plan, peaks: Peaks) -> list[Figure]:
    """Forward, then forward and backward."""
    return [
        figure
        for kind in ("forward", "training")
        for figure in sweep("registry", kind, contenders(kind == "training"), plan, peaks)
    ]


def contenders(training: bool) -> Iterator[Contender]:
    for op in registered_ops():
        for backend in op.backends:
            if backend != "reference":
                yield _contender(op, backend, training)


def _contender(op: Op, backend: str, training: bool) -> Contender:
    def prepare(length: int) -> Call:
        inputs, options = op.example(Draw(1, length, torch.float32, torch.Generator().manual_seed(0)))

        def forward() -> Tensor:
            result = op.call(*inputs, backend=backend, **options)
            return result if isinstance(result, Tensor) else result[0]

        if not training:

            def alone() -> Tensor:
                with torch.no_grad():
                    return forward()

            return alone
        leaves = [tensor.requires_grad_() for tensor in inputs]
        return lambda: torch.autograd.grad(forward().sum(), leaves, allow_unused=True)

    return Contender(f"{op.name} ({backend})", prepare, ours=True, memory=lambda length: 2e4 * length)
