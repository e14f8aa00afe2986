"""Hybrids: layers that keep their attention, chosen by what it costs to replace each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from latte.data import Corpus, PackedRows
from latte.errors import UserError
from latte.eval.gap import Gap
from latte.extend.model import LatteExtendedForCausalLM, convert
from latte.loading import Original

#: Tokens of the validation row on which costs are measured.
TOKENS = 2048


def check_full_layers(count: int, layers: int) -> None:
    """Refuse more layers than there are.

    Raises:
        UserError: there are fewer, or nothing would be replaced.
    """
    if count >= layers:
        raise UserError(f"full_layers is {count}, expected fewer than the {layers} layers of the model")


@torch.no_grad()
def replacement_costs(model: LatteExtendedForCausalLM, corpus: Corpus, say: Callable[[str], None]) -> list[float]:
    """By how much the loss on a validation row rises if one layer alone is replaced, for every layer."""
    length = min(TOKENS, len(corpus.valid.ids))
    batch = PackedRows(corpus.valid, length, "validation part").batch([0])
    gap = Gap([{name: value.to(model.device) for name, value in batch.items()}])
    best, costs = gap.loss(model, mode="original"), []
    for mixer in model.mixers:
        costs.append(gap.loss(model, alone=mixer.layer) - best)
        say(f"layer {mixer.layer} replaced alone: {costs[-1]:+.4f} nats")
    return costs


def dearest(costs: list[float], count: int) -> list[int]:
    """The layers with the largest costs, in order."""
    return sorted(sorted(range(len(costs)), key=lambda layer: -costs[layer])[:count])


def with_full_layers(
    original: Original, model: LatteExtendedForCausalLM, options: dict[str, Any], layers: list[int]
) -> LatteExtendedForCausalLM:
    """The extended model anew with ``layers`` as they were; all else is that of ``model``."""
    changed = convert(copy.deepcopy(original.model), options, layers)
    known = model.state_dict()
    changed.load_state_dict({name: known[name] for name in changed.state_dict()})
    return changed


def state_bytes(model: LatteExtendedForCausalLM) -> int:
    """Bytes of one row's state at its largest."""
    like_BTD = torch.empty(1, 1, model.base.config.hidden_size, dtype=model.dtype, device="meta")
    states = (mixer.expected_state(like_BTD) for mixer in model.mixers)
    return sum(tensor.numel() * tensor.element_size() for state in states for _, tensor in state.tensors())
