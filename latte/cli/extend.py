"""``latte extend``: a pretrained model that reads long contexts at linear cost."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from latte.cli.outcome import Outcome
from latte.cli.settings import parse
from latte.recipe import ExtendRecipe

NEEDS = "latte.workflows.extension"
DESCRIPTION = """Extend a pretrained language model to long contexts at linear cost: `latte extend MODEL --out DIR`. Its
attention becomes Latte-Macchiato around its own weights; only the small new part is trained. The same command goes on
where an earlier one ended, whatever ended it. --dry_run shows what it would take."""
EXAMPLE = "latte extend smollm2-135m --data.source books.txt --out long"


def read(arguments: Sequence[str]) -> Callable[[], Outcome]:
    return partial(run, parse("extend", DESCRIPTION, ExtendRecipe, arguments, positional="model", example=EXAMPLE))


def run(recipe: ExtendRecipe) -> Outcome:
    """Extend, and say what came of it."""
    from latte.report.model_card import gaps, perplexity_table
    from latte.workflows.extension import extend

    if recipe.dry_run:
        return show_plan(recipe)
    folder = extend(recipe)
    results = json.loads((folder / "results.json").read_text())
    for text, rows in results["perplexity"].items():
        print(perplexity_table(text, rows))
    print(gaps(results), end="")
    print(f"{folder / 'report.html'}: all figures, to look at")
    print(f"{folder}: AutoModelForCausalLM.from_pretrained({str(folder)!r}) after `import latte`")
    return Outcome({"model": folder, "results": results})


def show_plan(recipe: ExtendRecipe) -> Outcome:
    """Print the plan and touch nothing but the token cache."""
    from latte.workflows.estimate import estimate_cost as make_plan
    from latte.workflows.extension import mixer_options, open_inputs

    console = Console()
    original, corpus = open_inputs(recipe, Console(file=sys.stderr))
    plan = make_plan(recipe, original, corpus, mixer_options(recipe), Path(f"{recipe.out}-run"))
    console.print(f"{original.name}: {plan.parameters:,} parameters, {plan.new_parameters:,} of them new")
    console.print(f"memory while training: about {plan.memory_bytes / 2**30:.1f} GiB")
    console.print(f"state of a text while it is read: {plan.state_bytes / 2**20:.1f} MiB, whatever its length")
    if plan.full_bytes:
        console.print(
            f"{plan.full_bytes / 2**20:.1f} MiB of it because {recipe.full_layers} layers keep their attention"
        )
    table = Table("stage", "steps", "tokens", "time here", title="training", title_justify="left")
    for stage in plan.stages:
        table.add_row(stage.name, f"{stage.steps:,}", f"{stage.tokens:,}", _duration(stage.seconds))
    total = sum(stage.seconds for stage in plan.stages)
    table.add_row("all", "", f"{sum(stage.tokens for stage in plan.stages):,}", _duration(total))
    console.print(table)
    console.print("Times are measured on short rows and leave out the evaluation at the end.")
    return Outcome({"plan": plan})


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{max(1, minutes)} min"
