"""The learning rate of each model of a comparison, chosen from a few by short runs, as many and as long for each."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from latte.errors import NotFinite, UserError
from latte.files import digest_json, remove, write_text
from latte.recipe import Recipe, TrainRecipe
from latte.train import train


@dataclass(frozen=True)
class Search:
    """Learning rates that were tried, rising, and the validation loss that each came to; None: it was not finite."""

    rates: list[float]
    losses: list[float | None]

    @property
    def best(self) -> float:
        losses = [math.inf if loss is None else loss for loss in self.losses]
        return self.rates[losses.index(min(losses))]


def choose_rate(
    name: str,
    settings: Recipe,
    rates: Sequence[float],
    steps: int,
    folder: Path,
    data_digest: str,
    say: Callable[[str], None],
) -> Search:
    """Train a model for ``steps`` with each rate. What an earlier call has done is read from ``folder/name.json``.

    An interrupted run goes on where it was; finished ones leave their loss alone. Where ``steps`` are those of the
    whole training, the run with the best rate is kept as the model's own, at ``settings.out``.

    Raises:
        UserError: no rate comes to a finite loss, or what training raises.
        Stopped: a signal came; everything is saved.
    """
    whole = steps == settings.train.steps
    train_recipe = settings.train if whole else short_run(settings.train, steps)
    short = replace(settings, out=str(folder / name), train=train_recipe)
    kept = folder / f"{name}.json"
    key = digest_json([_without_places(short), data_digest])
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    losses: dict[str, float | None] = found["losses"] if found.get("key") == key else {}
    for rate in rates:
        if f"{rate:g}" in losses:
            continue
        run = replace(short, out=str(folder / name / f"{rate:g}"), train=replace(short.train, learning_rate=rate))
        loss = _loss(run)
        shown = "the loss is not finite" if loss is None else f"validation loss {loss:.4f}"
        say(f"{name}: learning rate {rate:g}, {steps} steps: {shown}")
        losses[f"{rate:g}"] = loss
        folder.mkdir(parents=True, exist_ok=True)
        write_text(kept, json.dumps({"key": key, "losses": losses}, indent=1) + "\n")
        if not whole:
            remove(Path(run.out))
    search = Search(list(rates), [losses[f"{rate:g}"] for rate in rates])
    if all(loss is None for loss in search.losses):
        raise UserError(
            f"{name}: the loss was not finite with any of the learning rates {', '.join(f'{rate:g}' for rate in rates)}"
        )
    best = folder / name / f"{search.best:g}"
    if whole and best.is_dir():
        if not Path(settings.out).exists():
            best.rename(settings.out)
        remove(folder / name)
    return search


def short_run(settings: TrainRecipe, steps: int) -> TrainRecipe:
    """A training of ``steps`` with a whole schedule of that length, which validates and saves at its end alone."""
    warmup = round(settings.warmup_steps * steps / settings.steps)
    return replace(
        settings, steps=steps, warmup_steps=warmup, eval_every=0, save_every=0, sample_every=0, keep_checkpoints=1
    )


def _loss(run: Recipe) -> float | None:
    try:
        loss = train(run, console=Console(quiet=True)).valid_loss
    except NotFinite:
        return None
    return loss if loss is not None and math.isfinite(loss) else None


def _without_places(run: Recipe) -> dict[str, Any]:
    """All that the loss depends on but the text itself, which is known by its digest."""
    values = asdict(run)
    values.pop("out")
    values["train"].pop("learning_rate")
    for name in ("source", "valid_source", "cache"):
        values["data"].pop(name)
    return values
