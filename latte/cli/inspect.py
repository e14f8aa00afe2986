"""``latte inspect``: a page that shows what a model attends to on a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from latte.cli.outcome import Outcome
from latte.cli.settings import parse, text_or_file
from latte.errors import UserError
from latte.files import require_file_place
from latte.recipe import InspectRecipe

NEEDS = "latte.report"
DESCRIPTION = """Write a page on which you choose a token and see which positions it attends to: how much through the
window, and how much through each latent."""
EXAMPLE = "latte inspect runs/mine --text 'import os'"


def read(arguments: Sequence[str]) -> Callable[[], Outcome]:
    recipe = parse(
        "inspect", DESCRIPTION, InspectRecipe, arguments, positional="model", example=EXAMPLE, from_recipe=False
    )
    text = text_or_file(recipe.text, recipe.file)
    if text is None:
        raise UserError(f"no text was given, expected --text or --file, for example: {EXAMPLE}")
    return partial(run, recipe, text)


def run(recipe: InspectRecipe, text: str) -> Outcome:
    """Write the page and say where it is."""
    from latte.loading import load_folder as load  # heavy: after the settings are known to be good
    from latte.report import inspect_text, render_inspection

    console, out = Console(), Path(recipe.out)
    require_file_place(out)
    loaded, tokenizer = load(recipe.model)
    title = Path(recipe.model).resolve().name
    inspection = inspect_text(loaded, tokenizer, text, max_tokens=recipe.tokens, title=title)
    if inspection.reason is not None:
        raise UserError(f"{recipe.model}: {inspection.reason}")
    if inspection.dropped:
        console.print(
            f"the text is cut to its first {recipe.tokens} tokens: {inspection.dropped} more are not shown",
            highlight=False,
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render_inspection(inspection), encoding="utf-8")
    console.print(f"wrote {out}", highlight=False, soft_wrap=True)
    return Outcome({"written": out, "tokens": len(inspection.tokens), "dropped": inspection.dropped})
