"""What models are trained to do: each task is one object with its data, its model and its metrics."""

from __future__ import annotations

from collections.abc import Callable

from latte.recipe import Recipe
from latte.tasks.base import Score, Task
from latte.tasks.classify import Classify
from latte.tasks.language import Language
from latte.tasks.recall import Recall

TASKS: dict[str, type[Task]] = {"language": Language, "recall": Recall, "classify": Classify}


def open_task(recipe: Recipe, say: Callable[[str], None] = lambda message: None) -> Task:
    """The task of a recipe, with its data read or generated.

    Raises:
        UserError: settings or data that can't be used.
    """
    return TASKS[recipe.task](recipe, say)  # type: ignore[call-arg]


__all__ = ["TASKS", "Classify", "Language", "Recall", "Score", "Task", "open_task"]
