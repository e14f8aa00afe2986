"""``latte report``: a page about a run, or about several side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from latte.cli.outcome import Outcome
from latte.cli.settings import parse, text_or_file
from latte.files import require_file_place
from latte.recipe import ReportRecipe

NEEDS = "latte.report"
DESCRIPTION = """Write one page that needs nothing else: loss curves, quality by context, speed and memory by length,
samples, heat maps of p(l|t), and a view of what each token attends to."""
EXAMPLE = "latte report runs/mine"


def read(arguments: Sequence[str]) -> Callable[[], Outcome]:
    recipe = parse(
        "report", DESCRIPTION, ReportRecipe, arguments, positional="folder", example=EXAMPLE, from_recipe=False
    )
    return partial(run, recipe, text_or_file(recipe.text, recipe.file))


def run(recipe: ReportRecipe, text: str | None = None) -> Outcome:
    """Write the page and say where it is."""
    from latte.report import build_report, render_report, report_of_extension

    path = Path(recipe.folder) / "report.html" if recipe.out is None else Path(recipe.out)
    require_file_place(path)
    page = report_of_extension(Path(recipe.folder))
    if page is not None:
        return _write(path, page, runs=[Path(recipe.folder).name], notes=[])
    say = partial(Console(stderr=True).print, highlight=False)
    report = build_report(recipe.folder, text=text, measure=recipe.measure, sample_tokens=recipe.sample_tokens, say=say)
    return _write(path, render_report(report), runs=[run.name for run in report.runs], notes=report.notes)


def _write(path: Path, page: str, **about: Any) -> Outcome:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    print(f"wrote {path}")
    return Outcome({"written": path, **about})
