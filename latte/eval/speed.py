"""Training and writing speed of several models, timed in turns: whatever else the machine does slows all alike."""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from latte.data import Batch
from latte.decode.off import modules_only
from latte.eval.decode_timing import engine_of, random_ids, read_context, time_tokens
from latte.eval.stream import longest_context
from latte.loading import load
from latte.recipe import TrainRecipe
from latte.tasks.language import inputs_for
from latte.train.trainer import training_arguments

#: Threads that still wait for work of the call before go to sleep in this time.
PAUSE = 0.01


@dataclass(frozen=True)
class Speed:
    """Tokens a second of one model, in its fastest round."""

    train_tokens_per_second: float  # optimiser steps of a whole batch
    decode_tokens_per_second: float  # one row, one token at a time, as the model decodes by itself
    decode_engine: str  # "kernel": one native call a token; "modules": torch, layer by layer
    module_tokens_per_second: float  # the same by modules alone, as every model can


def time_models(
    folders: Mapping[str, str | Path],
    batch: Batch,
    settings: TrainRecipe,
    *,
    context: int,
    tokens: int,
    rounds: int,
    say: Callable[[str], None] = lambda message: None,
) -> dict[str, Speed]:
    """Time every run's final model: ``rounds`` optimiser steps on ``batch``, and writing ``tokens`` as often.

    One round of each kind comes before, to warm up. All models are in memory at once, without gradients or states of
    optimisers. Learning rates are 0: the weights stay as they are.

    Args:
        context: tokens before the end of what is written; less where a model has fewer learned positions.
    """
    models = {name: _Timed(Path(folder), settings, context, tokens) for name, folder in folders.items()}
    best: dict[str, dict[str, float]] = {name: {} for name in models}
    kinds = {
        "training": lambda model: model.step(batch),
        "writing": lambda model: model.write(),
        "writing by modules": lambda model: model.write_by_modules(),
    }
    collecting = gc.isenabled()
    gc.disable()
    try:
        for kind, call in kinds.items():
            say(f"timing {kind}")
            for turn in range(rounds + 1):
                for name, model in models.items():
                    time.sleep(PAUSE)
                    seconds = call(model)
                    if turn:
                        best[name][kind] = min(best[name].get(kind, seconds), seconds)
                gc.collect()
    finally:
        if collecting:
            gc.enable()
    count = batch["input_ids"].numel()
    return {
        name: Speed(
            train_tokens_per_second=count / best[name]["training"],
            decode_tokens_per_second=model.tokens / best[name]["writing"],
            decode_engine=model.engine,
            module_tokens_per_second=model.tokens / best[name]["writing by modules"],
        )
        for name, model in models.items()
    }


def load_average() -> float | None:
    """Processes that wanted a core in the last minute; None where the system does not count them."""
    try:
        return round(os.getloadavg()[0], 2)
    except OSError:
        return None


class _Timed:
    """One model, and what it needs to be timed."""

    def __init__(self, folder: Path, settings: TrainRecipe, context: int, tokens: int) -> None:
        args = training_arguments(folder, settings)
        self.settings, self.bfloat16, self.device = settings, args.bf16, args.device
        self.model: Any = load(str(folder))[0].to(self.device).eval()
        if settings.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        context = min(context, longest_context(self.model) or context)
        self.tokens = min(tokens, context - 1)
        ids_BT = random_ids(self.model, context)
        self.new_BT = ids_BT[:, context - self.tokens :]
        self.cache = read_context(self.model, ids_BT[:, : context - self.tokens], chunk=512)
        self.engine = ""

    def step(self, batch: Batch) -> float:
        """Seconds of an optimiser step, with gradients accumulated over micro-batches as in training."""
        micro = self.settings.micro_batch_size or self.settings.batch_size
        parts = [
            dict(zip(batch, values, strict=True))
            for values in zip(*(v.split(micro) for v in batch.values()), strict=True)
        ]
        self.model.train()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=True)
        began = self._clock()
        for part in parts:
            inputs = {name: value.to(self.device) for name, value in part.items()}
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16):
                loss = self.model(**inputs_for(self.model, inputs)).loss
            (loss / len(parts)).backward()
        if self.settings.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        optimizer.step()
        seconds = self._clock() - began
        self.model.zero_grad(set_to_none=True)
        self.model.eval()
        return seconds

    def write(self) -> float:
        """Seconds of all new tokens, one at a time."""
        seconds, cache = time_tokens(self.model, copy.deepcopy(self.cache), self.new_BT)
        self.engine = engine_of(cache)
        return sum(seconds)

    def write_by_modules(self) -> float:
        with modules_only(self.model):
            return sum(time_tokens(self.model, copy.deepcopy(self.cache), self.new_BT)[0])

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
