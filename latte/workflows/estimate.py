"""What an extension will cost: parameters, tokens, memory, and time on this machine, measured on a few tokens."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from latte.data import Corpus
from latte.extend.model import LatteExtendedForCausalLM, convert
from latte.loading import Original
from latte.recipe import ExtendRecipe
from latte.workflows.hybrid import state_bytes
from latte.workflows.remembering import NAME as REMEMBER
from latte.workflows.remembering import plan_remember
from latte.workflows.stages import Stage, open_latents, plan_stages

SAMPLE = 256  # tokens of the row that a stage is timed on


@dataclass(frozen=True)
class StageCost:
    """Cost of one stage."""

    name: str
    steps: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Cost:
    """Cost of an extension."""

    parameters: int
    new_parameters: int
    memory_bytes: int
    state_bytes: int  # of one row, at its largest
    full_bytes: int  # of them by layers that keep their attention
    stages: list[StageCost]


def estimate_cost(recipe: ExtendRecipe, original: Original, corpus: Corpus, options: dict, folder: Path) -> Cost:
    """Convert the model, and time the loss and gradient of each stage on a short row."""
    model = convert(copy.deepcopy(original.model), options)
    parts = []
    stages = plan_stages(recipe, corpus, folder)
    remember = plan_remember(recipe, corpus, original, folder, lambda message: None)
    if remember is not None:
        settings = recipe.remember
        parts.append(
            StageCost(REMEMBER, settings.rows, settings.rows * settings.sequence_length, remember.seconds(model))
        )
    for stage in stages:
        open_latents(model, stages[0], recipe.opening)
        model.requires_grad_(False)
        for parameter in model.new_parameters().values():
            parameter.requires_grad_(True)
        tokens = stage.settings.steps * stage.settings.batch_size * stage.settings.sequence_length
        parts.append(StageCost(stage.name, stage.settings.steps, tokens, tokens * _seconds_per_token(model, stage)))
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    new = sum(parameter.numel() for parameter in model.new_parameters().values())
    # The pretrained model and the extended one, gradients and two moments of what is new, and activations of a row.
    longest = max((stage.settings.sequence_length for stage in stages), default=0)
    config = original.model.config
    per_token = 4 * config.num_hidden_layers * (12 * config.hidden_size + 3 * config.intermediate_size)
    state, full = _state_bytes(recipe, model, original, options)
    return Cost(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        new_parameters=new,
        memory_bytes=2 * weights + 12 * new + longest * per_token,
        state_bytes=state,
        full_bytes=full,
        stages=parts,
    )


def _seconds_per_token(model: torch.nn.Module, stage: Stage) -> float:
    batch = {name: value[:, :SAMPLE] for name, value in stage.rows.batch([0]).items()}
    best = float("inf")
    for _ in range(2):
        began = time.perf_counter()
        stage.loss(model, batch).backward()
        best = min(best, time.perf_counter() - began)
        model.zero_grad()
    return best / batch["input_ids"].shape[1]


def _state_bytes(
    recipe: ExtendRecipe, model: LatteExtendedForCausalLM, original: Original, options: dict
) -> tuple[int, int]:
    """Bytes of a row's state, and how many of them are there because some layers keep their attention."""
    without = state_bytes(model)
    if not recipe.full_layers:
        return without, 0
    # All layers have the same sizes, whichever are chosen; a family's own windows are what they are.
    state = state_bytes(convert(copy.deepcopy(original.model), options, range(recipe.full_layers)))
    return state, state - without
