"""Scores on few-shot tasks as a table with a column for each model: for the terminal, and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from latte.eval.fewshot import FewShot, read_scores
from latte.files import write_text


def lines(rows: Sequence[FewShot]) -> list[list[str]]:
    """The table's head and its lines: one for each task and number of shots, and the mean of those that all have."""
    models = list(dict.fromkeys(row.model for row in rows))
    found = [["task", "shots", "questions", "metric", *models]]
    by_place = {(row.task, row.shots, row.model): row for row in rows}
    for shots in sorted({row.shots for row in rows}):
        whole = []
        for task in dict.fromkeys(row.task for row in rows if row.shots == shots):
            same = [by_place.get((task, shots, model)) for model in models]
            first = next(row for row in same if row is not None)
            cells = ["" if row is None else f"{row.score:.1%} ± {row.standard_error:.1%}" for row in same]
            found.append([task, str(shots), f"{first.questions:,}", first.metric, *cells])
            whole += [same] if None not in same else []
        if len(whole) > 1:
            means = [_mean([row for row in column if row is not None]) for column in zip(*whole, strict=True)]
            found.append([f"mean of {len(whole)}", str(shots), "", "", *means])
    return found


def _mean(rows: Sequence[FewShot]) -> str:
    """Of tasks, each as heavy as another; their errors are independent."""
    error = sum(row.standard_error**2 for row in rows) ** 0.5 / len(rows)
    return f"{sum(row.score for row in rows) / len(rows):.1%} ± {error:.1%}"


def caption(rows: Sequence[FewShot]) -> str:
    """How to read the table, and what it took."""
    text = "Share of right answers ± its standard error; acc_norm divides an answer's log-probability by its length."
    samplers = {row.sampler for row in rows if row.shots}
    if samplers == {"default"}:
        text += " The solved examples are drawn for each question by lm-eval."
    elif samplers == {"first_n"}:
        text += " The solved examples are the first ones, the same for all questions, and never the question itself."
    for model in dict.fromkeys(row.model for row in rows):
        own = [row for row in rows if row.model == model]
        tokens, seconds = sum(row.tokens for row in own), sum(row.seconds for row in own)
        text += f" {model}: {tokens:,} tokens read in {seconds / 60:.1f} minutes."
    return text


def rich_table(rows: Sequence[FewShot]) -> Table:
    head, *rest = lines(rows)
    table = Table(*head, title=caption(rows), title_justify="left")
    for line in rest:
        table.add_row(*line)
    return table


def markdown(rows: Sequence[FewShot]) -> str:
    head, *rest = lines(rows)
    table = "".join("| " + " | ".join(line) + " |\n" for line in [head, ["---"] * len(head), *rest])
    return f"{table}\n{caption(rows)}\n"


def write(scores: Path) -> Path:
    """The table of a file of scores, in Markdown beside it."""
    path = scores.with_suffix(".md")
    write_text(path, markdown(read_scores(scores)))
    return path
