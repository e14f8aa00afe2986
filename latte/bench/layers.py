"""One layer of each kind, and what of ours is mixing: everything in the mixer that is not one of its projections."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from latte.bench import yardsticks
from latte.bench.figures import Contender, Figure, Plan, sweep
from latte.bench.harness import Call, Skipped
from latte.bench.machine import Peaks
from latte.bench.sizes import OURS, TRANSFORMER, Size
from latte.layers import linear
from latte.models.blocks import Block
from latte.tokens import Tokens

#: Makes a module and the call of it.
Maker = Callable[[Size], tuple[nn.Module, Callable[[Tensor], Tensor]]]
RECURRENT_GEMMA, MAMBA2, MAMBA = "RecurrentGemma (transformers)", "Mamba-2 (transformers)", "Mamba (mambapy)"


def run(plan: Plan, peaks: Peaks, size: Size) -> list[Figure]:
    """Forward and training of all layers, then the shares of ours."""
    figures = []
    for kind in ("forward", "training"):
        all_layers = contenders(size, kind == "training")
        of_ours = next(layer.flops for layer in all_layers if layer.ours and layer.flops is not None)
        figures += sweep("layers", kind, all_layers, plan, peaks, yardsticks=yardsticks.products(of_ours))
    return figures + shares(plan, size)


def contenders(size: Size, training: bool) -> list[Contender]:
    """Our block and the Transformer's, and the peers' blocks of the same width with their usual expansion."""
    peers: dict[str, tuple[Maker, float]] = {
        RECURRENT_GEMMA: (_recurrent_gemma, 24.0),
        MAMBA2: (_mamba2, 120.0),
        MAMBA: (_mamba, 4 * 16 * 12.0),
    }
    return [
        *(_block(variant, size, training) for variant in (OURS, TRANSFORMER)),
        *(_peer(name, make, numbers, size, training) for name, (make, numbers) in peers.items()),
    ]


def _block(variant: str, size: Size, training: bool) -> Contender:
    torch.manual_seed(0)
    ours, times = variant == OURS, 3.0 if training else 1.0
    block = Block(size.layer_config(variant), 0)

    def flops(length: int) -> float:
        mixing = size.mixing_flops() if ours else 2.0 * length * size.width
        return times * length * (_matrix_flops(block) + mixing)

    return Contender(
        variant,
        _prepare(lambda x: block(x, None, Tokens.of(x))[0], block, size.width, training),
        ours=ours,
        growth=1.0 if ours else 2.0,
        memory=lambda length: (120.0 if training else 40.0) * size.width * 4.0 * length,
        flops=flops,
    )


def _peer(name: str, make: Maker, numbers: float, size: Size, training: bool) -> Contender:
    """A peer that is made anew for every length; it holds about ``numbers`` per token and channel."""

    def prepare(length: int) -> Call:
        try:
            torch.manual_seed(0)
            module, call = make(size)
        except ImportError as error:
            raise Skipped(f"{error.name or error} is not installed (pip install 'latte-attention[bench]')") from error
        return _prepare(call, module, size.width, training)(length)

    times = 3.0 if training else 1.0
    return Contender(name, prepare, memory=lambda length: times * numbers * size.width * 4.0 * length)


def shares(plan: Plan, size: Size) -> list[Figure]:
    """The time of mixing, of projections (the MLP's too) and of the rest in a forward pass of our layer."""
    torch.manual_seed(0)
    block = Block(size.layer_config(OURS), 0).eval()
    clock = _Clock(block)
    figures = []
    for length in plan.lengths:
        x_BTD = torch.randn(1, length, size.width)
        best: dict[str, float] = {}
        spent = 0.0
        with torch.no_grad(), clock:
            block(x_BTD, None, Tokens.of(x_BTD))
            for _ in range(plan.repeats):
                parts = clock.measure(partial(block, x_BTD, None, Tokens.of(x_BTD)))
                spent += parts["layer"]
                if not best or parts["layer"] < best["layer"]:
                    best = parts
                if spent > plan.budget:
                    break
        share = best["mixing"] / best["layer"]
        figures.append(Figure("layers", "share", OURS, length, True, best["layer"], extra={**best, "share": share}))
        plan.say(f"layers share   {length:>7} {OURS:<28}{100 * share:11.1f} % of the layer is mixing")
    return figures


class _Clock:
    """Adds up the time in a block's mixer and in projections: by hooks on the mixer, and by timing the product itself.

    Hooks on a projection would keep the faster product away from it.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.times: dict[str, float] = {}
        self.start: float | None = None  # while the mixer runs
        self.product = linear.project

    def __enter__(self) -> _Clock:
        mixer: nn.Module = self.block.mixer  # type: ignore[assignment]
        self.handles = [mixer.register_forward_pre_hook(self._enter), mixer.register_forward_hook(self._leave)]
        linear.project = self._project
        return self

    def __exit__(self, *_: object) -> None:
        linear.project = self.product
        for handle in self.handles:
            handle.remove()

    def _enter(self, *_: Any) -> None:
        self.start = time.perf_counter()

    def _leave(self, *_: Any) -> None:
        assert self.start is not None
        # A long row is read in pieces, each by a call of the mixer.
        self.times["mixer"] = self.times.get("mixer", 0.0) + time.perf_counter() - self.start
        self.start = None

    def _project(self, *args: Any) -> Tensor:
        start = time.perf_counter()
        y = self.product(*args)
        place = "projections of the MLP" if self.start is None else "projections of the mixer"
        self.times[place] = self.times.get(place, 0.0) + time.perf_counter() - start
        return y

    def measure(self, call: Callable[[], object]) -> dict[str, float]:
        self.times.clear()
        start = time.perf_counter()
        call()
        layer = time.perf_counter() - start
        mixing = self.times["mixer"] - self.times["projections of the mixer"]
        projections = self.times["projections of the mixer"] + self.times["projections of the MLP"]
        return {"layer": layer, "mixing": mixing, "projections": projections, "rest": layer - mixing - projections}


def _matrix_flops(module: nn.Module) -> float:
    return sum(2.0 * layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))


def _prepare(call: Callable[[Tensor], Tensor], module: nn.Module, width: int, training: bool) -> Callable[[int], Call]:
    def prepare(length: int) -> Call:
        x_BTD = torch.randn(1, length, width, requires_grad=training)
        if not training:

            def forward() -> Tensor:
                with torch.no_grad():
                    return call(x_BTD)

            return forward
        leaves = [x_BTD, *(weight for weight in module.parameters() if weight.requires_grad)]
        gradient = torch.randn(1, length, width)
        return lambda: torch.autograd.grad(call(x_BTD), leaves, gradient, allow_unused=True)

    return prepare


def _recurrent_gemma(size: Size) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    from transformers import RecurrentGemmaConfig
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

    config = RecurrentGemmaConfig(hidden_size=size.width, lru_width=size.width, num_attention_heads=size.heads)
    module = RecurrentGemmaRecurrentBlock(config, 0)
    for weight in module.rg_lru.parameters():
        nn.init.normal_(weight, std=0.02)
    return module, lambda x: module(x, torch.arange(x.shape[1])[None], None, use_cache=False)[0]


def _mamba2(size: Size) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    heads = 2 * size.width // (size.width // size.heads)
    config = Mamba2Config(
        hidden_size=size.width, num_heads=heads, head_dim=2 * size.width // heads, state_size=64, n_groups=1, expand=2
    )
    module = Mamba2Mixer(config, 0)
    return module, lambda x: module(x)


def _mamba(size: Size) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    from mambapy.mamba import MambaBlock, MambaConfig

    module = MambaBlock(MambaConfig(d_model=size.width, n_layers=1))
    return module, module
