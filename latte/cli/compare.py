"""``latte compare``: several variants on the same budget, side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from latte.cli.outcome import Outcome
from latte.cli.settings import parse
from latte.recipe import CompareRecipe

NEEDS = "latte.workflows.comparison"
DESCRIPTION = """Train several variants or mixers on the same text, tokens and settings, and put quality, speed, memory
and size of state side by side, as a table and as plots. What an earlier call has done is not done again."""
EXAMPLE = "latte compare --config demo-compare"


def read(arguments: Sequence[str]) -> Callable[[], Outcome]:
    return partial(run, parse("compare", DESCRIPTION, CompareRecipe, arguments, example=EXAMPLE))


def run(recipe: CompareRecipe) -> Outcome:
    """Compare, print the table and write it beside the runs."""
    from latte.report.comparison import rich_table, write
    from latte.report.verdict import losses_to_others
    from latte.workflows.comparison import compare

    notes = Console(file=sys.stderr)
    rows = compare(recipe, notes.print)
    Console(width=None if sys.stdout.isatty() else 160).print(rich_table(rows))
    verdict = losses_to_others(rows)
    if verdict:
        print(f"Where {rows[0].name} loses:")
    for title, text in verdict:
        print(f"  {title} {text}")
    written = write(rows, Path(recipe.out))
    for path in written:
        notes.print(f"wrote {path}", highlight=False)
    return Outcome({"rows": rows, "written": written})
