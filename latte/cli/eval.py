"""``latte eval``: perplexity by context length, streaming."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from latte.cli.outcome import Outcome
from latte.cli.settings import parse
from latte.recipe import EvalRecipe

NEEDS = "latte.eval.run"
DESCRIPTION = """Measure perplexity and bits per byte at any context length, in constant memory: `latte eval MODEL`.
At every length the same tokens are scored; the loss by position shows where a model stops using what it has read. With
--tasks, measure accuracy on few-shot tasks instead."""
EXAMPLE = "latte eval runs/mine --contexts 256 2048"


def read(arguments: Sequence[str]) -> Callable[[], Outcome]:
    return partial(run, parse("eval", DESCRIPTION, EvalRecipe, arguments, positional="model", example=EXAMPLE))


def run(recipe: EvalRecipe) -> Outcome:
    """Evaluate, and print two tables; with tasks, one."""
    if recipe.tasks:
        return run_tasks(recipe)
    from latte.eval.run import run_eval

    console = Console()
    result, text = run_eval(recipe)
    tokens = result.contexts[0].tokens
    title = f"{recipe.model}: {tokens:,} tokens of {len(text.documents)} documents, the same at every length"
    table = Table("context", "loss", "perplexity", "bits/byte", "tokens/s", "state", title=title, title_justify="left")
    for row in result.contexts:
        table.add_row(
            f"{row.context:,}",
            f"{row.loss:.4f}",
            f"{row.perplexity:,.2f}",
            f"{row.bits_per_byte:.4f}",
            f"{row.tokens_per_second:,.0f}",
            f"{row.state_bytes / 1024:,.0f} KiB",
        )
    console.print(table)
    for context in result.unreached:
        console.print(
            f"not measured at {context:,}: the longest document has {result.longest_document:,} tokens "
            "(--join_documents reads all as one)",
            highlight=False,
        )
    table = Table("tokens before", "loss", "tokens", title="loss by position", title_justify="left")
    for place in result.positions:
        table.add_row(f"{place.first:,} - {place.last:,}", f"{place.loss:.4f}", f"{place.tokens:,}")
    console.print(table)
    return Outcome({"model": recipe.model, "documents": len(text.documents), **asdict(result)})


def run_tasks(recipe: EvalRecipe) -> Outcome:
    """Score few-shot tasks, print a table with a column for each model, and write it beside the scores."""
    from latte.eval.fewshot import run_fewshot
    from latte.report import fewshot

    notes = Console(stderr=True)
    rows = run_fewshot(recipe, partial(notes.print, highlight=False))
    Console(width=None if sys.stdout.isatty() else 160).print(fewshot.rich_table(rows))
    written = [] if recipe.out is None else [fewshot.write(Path(recipe.out))]
    for path in written:
        notes.print(f"wrote {path}", highlight=False)
    return Outcome({"model": recipe.model, "rows": rows, "written": written})
