"""One layer of every registered mechanism, trained at the width of the small preset: figures for docs/mechanisms.md.

Beside it stands the layer of transformers that does the same, where there is one, in its plain torch code, and the
products of our projections alone: what no mixing, however fast, could save.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from latte.bench.figures import Contender, Figure, Plan, sweep
from latte.bench.harness import Call
from latte.bench.machine import Peaks
from latte.bench.mechanism_peers import PEERS
from latte.mixers import names
from latte.models.presets import example_layer
from latte.tokens import Tokens

#: Peers that loop over tokens in Python: the gradient of every step fills a whole row with zeros, so that their time
#: grows with the square of the length, to minutes at 4,096 tokens. A shorter row is in their favour.
LOOPS = ("mamba", "rwkv4")


def run(plan: Plan, peaks: Peaks, size: str = "small") -> list[Figure]:
    """Forward and backward; a mechanism that is both is measured causal. Loops get a quarter of the tokens."""
    contenders = [_contender(name, size) for name in names()] + [_projections(name, size) for name in PEERS]
    contenders += [_peer(name, size) for name in PEERS if name not in LOOPS]
    loops = [_peer(name, size) for name in LOOPS]
    shorter = [max(length // 4, 1) for length in plan.lengths]
    return sweep("mechanisms", "training", contenders, plan, peaks) + sweep(
        "mechanisms", "training", loops, plan, peaks, shorter
    )


def _contender(name: str, size: str) -> Contender:
    torch.manual_seed(0)
    mixer = example_layer(name, size)
    width = mixer.config.hidden_size
    quadratic = mixer.config.bidirectional or mixer.growth == "linear"

    def prepare(length: int) -> Call:
        return _training(mixer, lambda x_BTD: mixer(x_BTD, tokens=Tokens.of(x_BTD))[0], width, length)

    growth = 2.0 if quadratic else 1.0
    return Contender(name, prepare, ours=True, growth=growth, memory=lambda length: 800.0 * width * length)


def _peer(name: str, size: str) -> Contender:
    def prepare(length: int) -> Call:
        torch.manual_seed(0)
        module, call = PEERS[name](example_layer(name, size))
        return _training(module, call, width, length)

    width = example_layer(name, size).config.hidden_size
    return Contender(f"{name} (transformers)", prepare, memory=lambda length: 2000.0 * width * length)


def _projections(name: str, size: str) -> Contender:
    mixer = example_layer(name, size)
    projections = [module for module in mixer.modules() if isinstance(module, nn.Linear)]

    def prepare(length: int) -> Call:
        calls = [_training(linear, linear, linear.in_features, length, linear.out_features) for linear in projections]
        return lambda: [call() for call in calls] and None

    return Contender(f"{name} (projections)", prepare)


def _training(
    module: nn.Module, call: Callable[[Tensor], Tensor], width: int, length: int, outputs: int | None = None
) -> Call:
    x_BTD = torch.randn(1, length, width, requires_grad=True)
    gradient = torch.randn(1, length, outputs or width)
    leaves = [x_BTD, *module.parameters()]
    return lambda: torch.autograd.grad(call(x_BTD), leaves, gradient, allow_unused=True)
