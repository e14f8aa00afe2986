"""``latte extend``: a pretrained model that reads long contexts at linear cost."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from latte.cli.settings import parse
from latte.errors import Stopped
from latte.recipe import ExtendRecipe

NEEDS = "latte.workflows.extension"
DESCRIPTION = """Extend a pretrained language model to long contexts at linear cost: `latte extend MODEL --out DIR`. Its
attention becomes Latte-Macchiato around its own weights; only the small new part is trained. The same command goes on
where an earlier one ended, whatever ended it. --dry_run shows what it would take."""


def read(arguments: Sequence[str]) -> Callable[[], int]:
    return partial(run, parse("extend", DESCRIPTION, ExtendRecipe, arguments, positional="model"))


def run(recipe: ExtendRecipe) -> int:
    """Extend, and say what came of it."""
    from latte.report.model_card import perplexity_table
    from latte.workflows.extension import extend

    if recipe.dry_run:
        return show_plan(recipe)
    try:
        folder = extend(recipe)
    except Stopped as stopped:
        print(f"latte extend: {stopped}", file=sys.stderr)
        return 128 + stopped.signal_number
    import json

    results = json.loads((folder / "results.json").read_text())
    for text, rows in results["perplexity"].items():
        print(perplexity_table(text, rows))
    print(f"{folder / 'report.html'}: all figures, to look at")
    print(f"{folder}: AutoModelForCausalLM.from_pretrained({str(folder)!r}) after `import latte`")
    return 0


def show_plan(recipe: ExtendRecipe) -> int:
    """Print the plan and touch nothing but the token cache."""
    from latte.workflows.estimate import estimate_cost as make_plan
    from latte.workflows.extension import mixer_options, open_inputs

    console = Console()
    original, corpus = open_inputs(recipe, Console(file=sys.stderr))
    plan = make_plan(recipe, original, corpus, mixer_options(recipe), Path(f"{recipe.out}-run"))
    console.print(f"{original.name}: {plan.parameters:,} parameters, {plan.new_parameters:,} of them new")
    console.print(f"memory while training: about {plan.memory_bytes / 2**30:.1f} GiB")
    table = Table("stage", "steps", "tokens", "time here", title="training", title_justify="left")
    for stage in plan.stages:
        table.add_row(stage.name, f"{stage.steps:,}", f"{stage.tokens:,}", _duration(stage.seconds))
    total = sum(stage.seconds for stage in plan.stages)
    table.add_row("all", "", f"{sum(stage.tokens for stage in plan.stages):,}", _duration(total))
    console.print(table)
    console.print("Times are measured on short rows and leave out the evaluation at the end.")
    return 0


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{max(1, minutes)} min"
