"""``latte bench``: speed and memory beside peers, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from latte.cli.outcome import Outcome
from latte.cli.settings import parse
from latte.recipe import SERVING_SUITES, BenchRecipe

NEEDS = "latte.bench"
DESCRIPTION = """Time ops, layers, models and decoding against peers on this CPU, in turns, and write the figures, plots
and a summary."""


def read(arguments: Sequence[str]) -> Callable[[], Outcome]:
    return partial(run, parse("bench", DESCRIPTION, BenchRecipe, arguments, from_recipe=False))


def run(recipe: BenchRecipe) -> Outcome:
    """Measure, print the figures as they come, and write them."""
    from latte.bench import run as measure

    say = partial(Console().print, highlight=False, markup=False)
    if recipe.suite in SERVING_SUITES:
        from latte.bench.serving import run as measure_serving

        measure_serving(recipe.suite, recipe.model, recipe.draft, recipe.quick, Path(recipe.out), say)
        return Outcome({"out": recipe.out})
    measure(recipe.suite, recipe.lengths or None, quick=recipe.quick, out=recipe.out, say=say, model=recipe.model)
    return Outcome({"out": recipe.out})
