"""What a page says of runs of tasks with answers: recall and classification."""

from __future__ import annotations

from typing import Any

import numpy as np

from latte.errors import UserError
from latte.recipe import Recipe
from latte.recipe.files import from_values
from latte.report.runs import RunView
from latte.tasks import open_task

LANGUAGE = "language"
WHAT = {"recall": "recall values by their keys", "classify": "classify"}


def example_ids(run: RunView) -> tuple[Any, str | None]:
    """Tokens of a held-out example, or a note why there are none."""
    try:
        ids = open_task(from_values(Recipe, run.recipe)).example()
    except (UserError, TypeError, OSError) as error:
        return None, f"The examples could not be read again ({error}): there is nothing to look inside with."
    return (np.array(ids, dtype=np.int64), None) if ids else (None, None)


def task_lead(runs: list[RunView], number: str, tokens: str) -> str:
    """What was trained and with which result, in two sentences."""
    what = WHAT.get(runs[0].task, runs[0].task)
    models = "A model" if len(runs) == 1 else f"{number} models"
    text = f"{models} trained to {what} on {tokens} tokens{' each' * (len(runs) > 1)}."
    ranked = sorted((run for run in runs if run.row.get("accuracy") is not None), key=_accuracy, reverse=True)
    if ranked:
        best, last = ranked[0], ranked[-1]
        text += f" Of examples never trained on, {best.name} answers {_accuracy(best):.1%} rightly"
        text += f", {last.name} {_accuracy(last):.1%}" if last is not best else ""
        chance = best.row.get("chance")
        text += "" if chance is None else f"; by chance it would be {chance:.2%}"
        text += "."
    return text


def _accuracy(run: RunView) -> float:
    return float(run.row.get("accuracy") or 0.0)
