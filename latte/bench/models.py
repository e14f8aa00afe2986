"""Whole language models of the same size: training steps, and reading."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from latte.bench.figures import Contender, Figure, Plan, sweep
from latte.bench.harness import Call
from latte.bench.machine import Peaks
from latte.bench.sizes import OURS, TRANSFORMER, Size, parameters

#: Where training with and without a document start at the first token is compared.
RESET_LENGTHS = (1024, 4096)
RESET_REPEATS = 6  # medians of three move by some percent, and the target is five


def run(plan: Plan, peaks: Peaks, size: Size) -> list[Figure]:
    """A training step (forward, loss, backward) and a forward pass at every length."""
    # The first step also asks the system for all its memory: it is no measure of the others, however long it takes.
    training = sweep("models", "training", contenders(size, True), replace(plan, at_least=1), peaks)
    training += _with_and_without_reset(plan, peaks, size)
    return training + sweep("models", "forward", contenders(size, False), plan, peaks)


def contenders(size: Size, training: bool) -> list[Contender]:
    """Ours and the Transformer on torch's attention."""
    return [_contender(variant, size, training) for variant in (OURS, TRANSFORMER)]


def without_reset(variant: str) -> str:
    """The name of a model that gets no document starts."""
    return f"{variant}, no reset"


def _with_and_without_reset(plan: Plan, peaks: Peaks, size: Size) -> list[Figure]:
    """Training steps with a document start at each row's first token, as ``latte train`` gives them, and without."""
    lengths = [length for length in plan.lengths if length in RESET_LENGTHS]
    pairs = [_contender(variant, size, True, reset) for variant in (OURS, TRANSFORMER) for reset in (True, False)]
    more = replace(plan, at_least=RESET_REPEATS)
    return sweep("models", "reset", pairs, more, peaks, lengths=lengths) if lengths else []


def _contender(variant: str, size: Size, training: bool, reset: bool = True) -> Contender:
    model = size.model(variant)
    ours, times = variant == OURS, 3.0 if training else 1.0
    # What a token keeps for the gradient: about this many numbers of the model's width in a layer.
    kept = 40.0 * size.layers if training else 40.0

    def prepare(length: int) -> Call:
        ids = torch.randint(0, size.vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
        starts = F.pad(torch.zeros(1, length - 1, dtype=torch.bool), (1, 0), value=True) if reset else None
        return lambda: _step(model, ids, starts) if training else _read(model, ids)

    def flops(length: int) -> float:
        mixing = size.mixing_flops() if ours else 2.0 * length * size.width
        return times * length * (2.0 * parameters(model) + size.layers * mixing)

    return Contender(
        variant if reset else without_reset(variant),
        prepare,
        ours=ours,
        growth=1.0 if ours else 1.7,
        memory=lambda length: kept * size.width * 4.0 * length,
        flops=flops,
    )


def _step(model: torch.nn.Module, ids: torch.Tensor, reset: torch.Tensor | None) -> torch.Tensor:
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids, reset=reset).loss
    loss.backward()
    return loss.detach()


def _read(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
