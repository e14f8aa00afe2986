"""``latte train``: train a model from a recipe."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial

from latte.cli.settings import parse
from latte.errors import Stopped
from latte.recipe import Recipe

NEEDS = "latte.train"
DESCRIPTION = """Train a model as a recipe says. The same command goes on where an earlier one ended, whatever ended it;
`torchrun --nproc-per-node N -m latte_cli train ...` shares the work over N processes."""


def read(arguments: Sequence[str]) -> Callable[[], int]:
    return partial(run, parse("train", DESCRIPTION, Recipe, arguments))


def run(recipe: Recipe) -> int:
    """Train, and say what came of it."""
    from latte.train import train

    try:
        result = train(recipe)
    except Stopped as stopped:
        print(f"latte train: {stopped}", file=sys.stderr)
        return 128 + stopped.signal_number
    loss = "" if result.valid_loss is None else f", validation loss {result.valid_loss:.4f}"
    print(f"{recipe.out}/model: {result.parameters:,} parameters, {result.tokens:,} tokens{loss}")
    return 0
