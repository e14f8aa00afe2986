"""``latte train``: train a model from a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from latte.cli.outcome import Outcome
from latte.cli.settings import parse
from latte.recipe import Recipe

NEEDS = "latte.train"
DESCRIPTION = """Train a model as a recipe says. The same command goes on where an earlier one ended, whatever ended it;
`torchrun --nproc-per-node N -m latte_cli train ...` shares the work over N processes."""
EXAMPLE = "latte train --config demo --out runs/mine"


def read(arguments: Sequence[str]) -> Callable[[], Outcome]:
    return partial(run, parse("train", DESCRIPTION, Recipe, arguments, example=EXAMPLE))


def run(recipe: Recipe) -> Outcome:
    """Train, and say what came of it."""
    import torch.distributed

    from latte.train import train

    result = train(recipe)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # its threads, still running at the process's end, may abort it
    loss = "" if result.valid_loss is None else f", validation loss {result.valid_loss:.4f}"
    print(f"{recipe.out}/model: {result.parameters:,} parameters, {result.tokens:,} tokens{loss}")
    return Outcome({"model": Path(recipe.out) / "model", **asdict(result)})
