"""``latte compare``: several variants on the same budget, side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from latte.cli.outcome import Outcome
from latte.cli.settings import parse
from latte.recipe import CompareRecipe

NEEDS = "latte.workflows.comparison"
DESCRIPTION = """Train several variants or mixers on the same data, tokens and settings, and put quality, speed, memory
and size of state side by side, as a table and as plots; of tasks with answers, accuracy. What an earlier call has done
is not done again."""
EXAMPLE = "latte compare --config demo-compare"


def read(arguments: Sequence[str]) -> Callable[[], Outcome]:
    return partial(run, parse("compare", DESCRIPTION, CompareRecipe, arguments, example=EXAMPLE))


def run(recipe: CompareRecipe) -> Outcome:
    """Compare, print the table and write it beside the runs."""
    from latte.report import comparison, task_comparison
    from latte.report.verdict import losses_to_others
    from latte.workflows.comparison import compare

    notes = Console(file=sys.stderr)
    rows: list[Any] = list(compare(recipe, notes.print))
    by_loss = recipe.task == "language"
    show: Any = comparison if by_loss else task_comparison
    Console(width=None if sys.stdout.isatty() else 160).print(show.rich_table(rows))
    verdict = losses_to_others(rows) if by_loss else []
    if verdict:
        print(f"Where {rows[0].name} loses:")
    for title, text in verdict:
        print(f"  {title} {text}")
    written = show.write(rows, Path(recipe.out))
    for path in written:
        notes.print(f"wrote {path}", highlight=False)
    return Outcome({"rows": rows, "written": written})
