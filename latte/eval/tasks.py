"""One model's row of a comparison by accuracy: recall and classification."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from latte.eval.comparison import SIZES
from latte.files import write_text
from latte.loading import load_folder
from latte.loading.layout import EVAL, RESULT, read_metrics
from latte.recipe import Recipe
from latte.tasks import Score, Task


@dataclass(frozen=True)
class TaskRow:
    """One model's row of the comparison."""

    name: str
    task: str
    parameters: int
    steps: int
    tokens: int
    valid_loss: float
    accuracy: float  # of all test answers
    standard_error: float
    scores: list[dict[str, Any]]  # by group of test examples: group, accuracy, loss, count, about
    chance: float | None
    majority: float | None
    curve: list[list[float]]  # step and validation accuracy
    seconds: float
    tokens_per_second: float
    peak_memory_bytes: int
    learning_rate: float = 0.0
    searched: list[list[float | None]] = field(default_factory=list)  # rates that were tried, each with its loss
    sizes: dict[str, int] = field(default_factory=dict)  # where they are not the preset's

    @property
    def rate_at_edge(self) -> bool:
        """Whether the lowest or the highest of the tried learning rates was best: one beyond might be better."""
        return bool(self.searched) and self.learning_rate in (self.searched[0][0], self.searched[-1][0])


def measure_task(
    name: str, settings: Recipe, task: Task, searched: Sequence[tuple[float, float | None]] = ()
) -> TaskRow:
    """Score a run's final model on all test examples, and write the scores to the run's folder."""
    folder = Path(settings.out)
    model, _ = load_folder(folder)
    scores = task.test(model)
    whole = total_score(scores)
    about: dict[str, Any] = {"chance": task.chance, "majority": task.majority}
    found: dict[str, Any] = {
        "model": settings.out,
        "accuracy": whole.accuracy,
        **about,
        "scores": [asdict(score) for score in scores],
    }
    write_text(folder / EVAL, json.dumps(found, indent=1) + "\n")
    result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
    lines = read_metrics(folder)
    return TaskRow(
        name=name,
        task=settings.task,
        **{name: result[name] for name in ("parameters", "steps", "tokens", "valid_loss", "seconds")},
        accuracy=whole.accuracy,
        standard_error=whole.standard_error,
        scores=found["scores"],
        chance=task.chance,
        majority=task.majority,
        curve=[[line["step"], line["valid_accuracy"]] for line in lines if "valid_accuracy" in line],
        tokens_per_second=result["tokens_per_second"],
        peak_memory_bytes=result["peak_memory_bytes"],
        learning_rate=settings.train.learning_rate,
        searched=[list(pair) for pair in searched],
        sizes={name: settings.model.overrides[name] for name in SIZES if name in settings.model.overrides},
    )


def total_score(scores: Sequence[Score]) -> Score:
    """The score of all answers."""
    count = sum(score.count for score in scores)
    mean = {name: sum(getattr(score, name) * score.count for score in scores) / count for name in ("accuracy", "loss")}
    return Score("", mean["accuracy"], mean["loss"], count)
