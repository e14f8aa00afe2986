"""One layer of every registered mechanism, trained at the width of the small preset: figures for docs/mechanisms.md."""

from __future__ import annotations

import torch

from latte.bench.figures import Contender, Figure, Plan, sweep
from latte.bench.harness import Call
from latte.bench.machine import Peaks
from latte.mixers import names
from latte.models.presets import example_layer
from latte.tokens import Tokens


def run(plan: Plan, peaks: Peaks, size: str = "small") -> list[Figure]:
    """Forward and backward; a mechanism that is both is measured causal."""
    return sweep("mechanisms", "training", [_contender(name, size) for name in names()], plan, peaks)


def _contender(name: str, size: str) -> Contender:
    torch.manual_seed(0)
    mixer = example_layer(name, size)
    width = mixer.config.hidden_size
    quadratic = mixer.config.bidirectional or mixer.growth == "linear"

    def prepare(length: int) -> Call:
        x_BTD = torch.randn(1, length, width, requires_grad=True)
        gradient = torch.randn(1, length, width)
        leaves = [x_BTD, *mixer.parameters()]
        return lambda: torch.autograd.grad(
            mixer(x_BTD, tokens=Tokens.of(x_BTD))[0], leaves, gradient, allow_unused=True
        )

    growth = 2.0 if quadratic else 1.0
    return Contender(name, prepare, ours=True, growth=growth, memory=lambda length: 800.0 * width * length)
