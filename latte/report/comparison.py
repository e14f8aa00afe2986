"""The results of a comparison: a table for the terminal, Markdown, JSON, and plots."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from latte.eval.comparison import Row
from latte.extras import need
from latte.files import write_text
from latte.loading.layout import COMPARISON, read_metrics

COLUMNS = {
    "model": lambda row: row.name,
    "params": lambda row: f"{row.parameters:,}",
    "loss at trained length": lambda row: f"{row.at_training['loss']:.4f} at {row.trained_context:,}",
    "loss at longest": lambda row: f"{row.contexts[-1]['loss']:.4f} at {row.contexts[-1]['context']:,}",
    "ppl": lambda row: f"{row.at_training['perplexity']:.2f}",
    "bpb": lambda row: f"{row.at_training['bits_per_byte']:.4f}",
    "train tok/s": lambda row: f"{row.train_tokens_per_second:,.0f}",
    "peak MiB": lambda row: f"{row.peak_memory_bytes / 2**20:,.0f}",
    "decode tok/s": lambda row: f"{row.decode_tokens_per_second:,.0f} ({row.decode_engine})",
    "state KiB": lambda row: f"{row.state_bytes / 1024:,.0f}",
}


def rich_table(rows: list[Row]) -> Table:
    table = Table(*COLUMNS, title=caption(rows), title_justify="left")
    for row in rows:
        table.add_row(*(form(row) for form in COLUMNS.values()))
    return table


def caption(rows: list[Row]) -> str:
    """What the rows have in common, and how to read them."""
    text = f"{rows[0].tokens:,} tokens of training each; losses at all lengths are of the same "
    text += f"{rows[0].at_training['tokens']:,} held-out tokens, and ppl and bpb are of the trained length."
    if rows[0].unreached:
        text += f" No document reaches {', '.join(f'{length:,}' for length in rows[0].unreached)} tokens: not measured."
    if len({row.decode_engine for row in rows}) > 1:
        text += " Decoding speeds compare engines (one native call a token, or torch modules) as well as mechanisms."
    return text


def markdown(rows: list[Row]) -> str:
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *([form(row) for form in COLUMNS.values()] for row in rows)]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines) + f"\n{caption(rows)}\n"


def write(rows: list[Row], folder: Path) -> list[Path]:
    """results.json, table.md and the plots, in the comparison's folder."""
    write_text(folder / COMPARISON, json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    write_text(folder / "table.md", markdown(rows))
    return [folder / COMPARISON, folder / "table.md", *plots(rows, folder)]


def plots(rows: list[Row], folder: Path) -> list[Path]:
    """Loss while training, by context length and by position; speed, memory and state."""
    need("matplotlib", "a plot")
    from matplotlib.figure import Figure  # drawn without pyplot: no display, no global state

    curves = Figure(figsize=(15, 4.5), layout="constrained")
    training, context, position = curves.subplots(1, 3)
    for row in rows:
        lines = [line for line in read_metrics(folder / row.name) if "valid_loss" in line]
        training.plot(
            [line["step"] for line in lines], [line["valid_loss"] for line in lines], label=row.name, marker="."
        )
        context.plot(
            [e["context"] for e in row.contexts], [e["loss"] for e in row.contexts], label=row.name, marker="o"
        )
        position.plot(
            [(e["first"] * e["last"]) ** 0.5 for e in row.positions], [e["loss"] for e in row.positions], label=row.name
        )
    for axis, title, label in (
        (training, "validation loss while training", "step"),
        (context, "loss of the same tokens by context", "context (tokens)"),
        (position, "loss by position, longest context", "tokens before"),
    ):
        axis.set(title=title, xlabel=label, ylabel="nats a token")
        axis.grid(alpha=0.3)
    context.set_xscale("log", base=2)
    position.set_xscale("log", base=2)
    training.legend(fontsize="small")

    costs = Figure(figsize=(15, 0.9 + 0.45 * len(rows)), layout="constrained")
    bars = {
        "training, tokens/s": [row.train_tokens_per_second for row in rows],
        "peak memory, MiB": [row.peak_memory_bytes / 2**20 for row in rows],
        "decoding, tokens/s" + (" (different engines)" if len({row.decode_engine for row in rows}) > 1 else ""): [
            row.decode_tokens_per_second for row in rows
        ],
        "state, KiB": [row.state_bytes / 1024 for row in rows],
    }
    for number, (axis, (title, values)) in enumerate(zip(costs.subplots(1, len(bars)), bars.items(), strict=True)):
        drawn = axis.barh([row.name for row in rows], values, color=[f"C{index % 10}" for index in range(len(rows))])
        axis.bar_label(drawn, fmt="{:,.0f}", padding=2, fontsize="small")
        axis.set_title(title)
        axis.margins(x=0.25)
        axis.invert_yaxis()
        if number:
            axis.set_yticklabels([])
    paths = [folder / "quality.png", folder / "cost.png"]
    for figure, path in zip((curves, costs), paths, strict=True):
        figure.savefig(path, dpi=120)
    return paths
