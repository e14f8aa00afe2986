"""The results of a comparison: a table for the terminal, Markdown, JSON, and plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from latte.eval.comparison import Row
from latte.files import write_text
from latte.loading.layout import COMPARISON
from latte.report.comparison_plots import plots
from latte.report.verdict import verdict

Form = Callable[[Row], str]


def columns(rows: list[Row]) -> dict[str, Form]:
    """The table's columns; what no row has is left out."""
    forms: dict[str, Form] = {"model": lambda row: row.name, "params": lambda row: f"{row.parameters:,}"}
    if any(row.sizes for row in rows):
        forms["sizes"] = lambda row: sizes_text(row.sizes)
    if any(row.searched for row in rows):
        forms["rate"] = lambda row: f"{row.learning_rate:g}" + "!" * row.rate_at_edge
    forms |= {
        "loss at trained length": lambda row: _loss(row.at_training),
        "loss at longest": lambda row: _loss(row.at_longest),
        "ppl": lambda row: f"{row.at_training['perplexity']:.2f}",
        "bpb": lambda row: f"{row.at_training['bits_per_byte']:.4f}",
        "train tok/s": lambda row: _rate(row.train_tokens_per_second),
        "peak MiB": lambda row: f"{row.peak_memory_bytes / 2**20:,.0f}",
        "write tok/s": lambda row: f"{_rate(row.decode_tokens_per_second)} ({row.decode_engine})",
        "by modules": lambda row: _rate(row.module_tokens_per_second),
        "state KiB": lambda row: f"{row.state_bytes / 1024:,.0f}",
    }
    return forms


def rich_table(rows: list[Row]) -> Table:
    forms = columns(rows)
    table = Table(*forms, title=caption(rows), title_justify="left")
    for row in rows:
        table.add_row(*(form(row) for form in forms.values()))
    return table


def caption(rows: list[Row]) -> str:
    """What the rows have in common, and how to read them."""
    first = rows[0]
    text = f"{first.tokens:,} tokens of training each; losses at all lengths are of the same "
    text += f"{first.at_training['tokens']:,} held-out tokens, and ppl and bpb are of the trained length."
    if first.at_training.get("standard_error") is not None:
        parts = len(first.at_training["parts"])
        text += f" ± is the standard error over {parts} parts of this text, with these weights."
    if first.unreached:
        text += f" No document reaches {', '.join(f'{length:,}' for length in first.unreached)} tokens: not measured."
    if any(row.searched for row in rows):
        rates = ", ".join(f"{rate:g}" for rate, _ in first.searched)
        text += f" Each learning rate is the best of {rates} in short runs"
        text += "; ! marks the lowest or highest of them." if any(row.rate_at_edge for row in rows) else "."
    text += " Speeds are the fastest of rounds in which all models took turns, writing those of one row"
    text += " as the model decodes by itself (kernel: one native call a token; modules: torch) and by modules alone"
    if first.load_average is not None:
        text += f"; the load average when they began was {first.load_average:g}"
    return text + "."


def markdown(rows: list[Row]) -> str:
    """The table, its caption, what the first model loses, and the search for learning rates."""
    text = f"{markdown_table(columns(rows), rows)}\n{caption(rows)}\n{verdict(rows)}"
    return text + (f"\n## Learning rates\n\n{searches(rows)}" if any(row.searched for row in rows) else "")


def write(rows: list[Row], folder: Path) -> list[Path]:
    """results.json, table.md and the plots, in the comparison's folder."""
    write_text(folder / COMPARISON, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    write_text(folder / "table.md", markdown(rows))
    return [folder / COMPARISON, folder / "table.md", *plots(rows, folder)]


def searches(rows: Sequence[Any]) -> str:
    """The table of the learning rates that were tried."""
    forms: dict[str, Callable[[Any], str]] = {"model": lambda row: row.name}
    for index, (rate, _) in enumerate(next(row.searched for row in rows if row.searched)):
        forms[f"{rate:g}"] = lambda row, index=index: _tried(row, index)  # type: ignore[misc]
    about = "Validation losses at the end of these runs, a whole schedule each; the chosen one is bold.\n\n"
    return about + markdown_table(forms, [row for row in rows if row.searched])


def _tried(row: Any, index: int) -> str:
    rate, loss = row.searched[index]
    text = "not finite" if loss is None else f"{loss:.4f}"
    return f"**{text}**" if rate == row.learning_rate else text


def markdown_table(forms: Mapping[str, Callable[[Any], str]], rows: Sequence[Any]) -> str:
    """Rows in Markdown: a column for each form."""
    lines = [list(forms), ["---"] * len(forms), *([form(row) for form in forms.values()] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _loss(entry: dict[str, Any]) -> str:
    error = entry.get("standard_error")
    return f"{entry['loss']:.4f}" + ("" if error is None else f" ± {error:.4f}") + f" at {entry['context']:,}"


def _rate(speed: float | None) -> str:
    return "-" if speed is None else f"{speed:,.0f}"


def sizes_text(sizes: dict[str, int]) -> str:
    """Sizes that are not the preset's, in words."""
    words = {"num_hidden_layers": "{} layers", "hidden_size": "width {}", "intermediate_size": "MLP {}"}
    return ", ".join(form.format(sizes[name]) for name, form in words.items() if name in sizes)
