"""The results of a comparison by accuracy: a table for the terminal, Markdown, JSON, curves and a heat map."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from latte.eval.tasks import TaskRow
from latte.extras import need
from latte.files import write_text
from latte.loading.layout import COMPARISON
from latte.report.comparison import markdown_table, searches, sizes_text
from latte.report.comparison_plots import COLOURS, new_figure

Form = Callable[[TaskRow], str]


def columns(rows: list[TaskRow]) -> dict[str, Form]:
    """The table's columns; what no row has is left out."""
    forms: dict[str, Form] = {"model": lambda row: row.name, "params": lambda row: f"{row.parameters:,}"}
    if any(row.sizes for row in rows):
        forms["sizes"] = lambda row: sizes_text(row.sizes)
    if any(row.searched for row in rows):
        forms["rate"] = lambda row: f"{row.learning_rate:g}" + "!" * row.rate_at_edge
    forms["accuracy"] = lambda row: f"{row.accuracy:.1%} ± {row.standard_error:.1%}"
    if len(rows[0].scores) > 1:
        for index, score in enumerate(rows[0].scores):
            forms[score["group"]] = lambda row, index=index: f"{row.scores[index]['accuracy']:.1%}"  # type: ignore[misc]
    forms |= {
        "best on the way": lambda row: f"{max((value for _, value in row.curve), default=row.accuracy):.1%}",
        "validation loss": lambda row: f"{row.valid_loss:.4f}",
        "minutes": lambda row: f"{row.seconds / 60:.1f}",
        "tokens/s": lambda row: f"{row.tokens_per_second:,.0f}",
        "peak MiB": lambda row: f"{row.peak_memory_bytes / 2**20:,.0f}",
    }
    return forms


def guesses(rows: list[TaskRow]) -> list[tuple[str, float]]:
    """Accuracies that need no model: chance, and the most frequent answer."""
    first = rows[0]
    named = (("chance", first.chance), ("the most frequent answer", first.majority))
    return [(name, value) for name, value in named if value is not None]


def rich_table(rows: list[TaskRow]) -> Table:
    forms = columns(rows)
    table = Table(*forms, title=caption(rows), title_justify="left")
    for row in rows:
        table.add_row(*(form(row) for form in forms.values()))
    for name, value in guesses(rows):
        table.add_row(name, *("" if head != "accuracy" else f"{value:.2%}" for head in list(forms)[1:]))
    return table


def caption(rows: list[TaskRow]) -> str:
    """What the rows have in common, and how to read them."""
    first = rows[0]
    scored = sum(score["count"] for score in first.scores)
    text = (
        f"{first.steps:,} steps and {first.tokens:,} tokens of training each; accuracy is of {scored:,} test answers, "
    )
    text += "± its standard error with these weights."
    if first.task == "recall":
        text += " Columns such as 64, 4 are of examples of 64 tokens with 4 pairs."
    if any(row.searched for row in rows):
        rates = ", ".join(f"{rate:g}" for rate, _ in first.searched)
        text += f" Each learning rate is the best of {rates} by the validation loss"
        text += "; ! marks the lowest or highest of them." if any(row.rate_at_edge for row in rows) else "."
    return (
        text + " Minutes and tokens/s are those of the training, without validations, with what else the machine did."
    )


def markdown(rows: list[TaskRow]) -> str:
    """The table with the rows of guesses, its caption, and the search for learning rates."""
    forms = columns(rows)
    text = markdown_table(forms, rows)
    for name, value in guesses(rows):
        cells = [name, *("" if head != "accuracy" else f"{value:.2%}" for head in list(forms)[1:])]
        text += "| " + " | ".join(cells) + " |\n"
    text += f"\n{caption(rows)}\n"
    return text + (f"\n## Learning rates\n\n{searches(rows)}" if any(row.searched for row in rows) else "")


def write(rows: list[TaskRow], folder: Path) -> list[Path]:
    """results.json, table.md and the plots, in the comparison's folder."""
    write_text(folder / COMPARISON, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    write_text(folder / "table.md", markdown(rows))
    need("matplotlib", "a plot")
    figures = {"accuracy.png": _curves(rows)}
    if len(rows[0].scores) > 1:
        figures["heat.png"] = _heat(rows)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=120)
    return [folder / COMPARISON, folder / "table.md", *(folder / name for name in figures)]


def _curves(rows: list[TaskRow]) -> Any:
    """Validation accuracy while training, and lines for chance and the most frequent answer."""
    figure = new_figure(9, 5)
    axis = figure.subplots()
    for number, row in enumerate(rows):
        style = "-" if number < COLOURS else "--"
        axis.plot([step for step, _ in row.curve], [value for _, value in row.curve], style, marker=".", label=row.name)
    for (name, value), style in zip(guesses(rows), (":", "-."), strict=False):
        axis.axhline(value, color="0.4", linestyle=style, linewidth=1, label=name)
    axis.set(title="validation accuracy while training", xlabel="step", ylabel="accuracy", ylim=(0, 1.02))
    axis.grid(alpha=0.3)
    axis.legend(fontsize="small")
    return figure


def _heat(rows: list[TaskRow]) -> Any:
    """Accuracy of each model on each group of test examples."""
    groups = [score["group"] for score in rows[0].scores]
    values = [[score["accuracy"] for score in row.scores] for row in rows]
    figure = new_figure(2.5 + 1.1 * len(groups), 1.5 + 0.45 * len(rows))
    axis = figure.subplots()
    image = axis.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axis.set_xticks(range(len(groups)), groups)
    axis.set_yticks(range(len(rows)), [row.name for row in rows])
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            axis.text(x, y, f"{value:.0%}", ha="center", va="center", color="black" if value > 0.6 else "white")
    labels = {"recall": "tokens, pairs"}
    axis.set(title="test accuracy", xlabel=labels.get(rows[0].task, "group"))
    figure.colorbar(image, ax=axis)
    return figure
