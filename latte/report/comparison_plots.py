"""Plots of a comparison. The first model stands out; with many, curves give way to one line for each model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latte.eval.comparison import Row
from latte.extras import need
from latte.loading.layout import read_metrics

#: More models than this can't be told apart by the colours of curves.
COLOURS = 10
STRONG, PALE = "C3", "C0"


def plots(rows: list[Row], folder: Path) -> list[Path]:
    """Loss while training, by context length and by position; speed, memory and state."""
    need("matplotlib", "a plot")
    figures = {"quality.png": _curves(rows, folder) if len(rows) <= COLOURS else _ranking(rows, folder)}
    figures["cost.png"] = _costs(rows)
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=120)
    return [folder / name for name in figures]


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches."""
    from matplotlib.figure import Figure  # drawn without pyplot: no display, no global state

    return Figure(figsize=(width, height), layout="constrained")


def _validation(row: Row, folder: Path) -> tuple[list[int], list[float]]:
    lines = [line for line in read_metrics(folder / row.name) if "valid_loss" in line]
    return [line["step"] for line in lines], [line["valid_loss"] for line in lines]


def _curves(rows: list[Row], folder: Path) -> Any:
    figure = new_figure(15, 4.5)
    training, context, position = figure.subplots(1, 3)
    for row in rows:
        training.plot(*_validation(row, folder), label=row.name, marker=".")
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
    return figure


def _ranking(rows: list[Row], folder: Path) -> Any:
    """Left: the losses of each model, sorted by the one at the trained length. Right: validation while training."""
    figure = new_figure(15, 1.6 + 0.26 * len(rows))
    ranking, training = figure.subplots(1, 2, width_ratios=(3, 2))
    ranked = sorted(rows, key=lambda row: row.at_training["loss"])
    for marker, at, colour, title in (
        ("o", "at_training", "C0", f"at {rows[0].trained_context:,} tokens, as trained"),
        ("D", "at_longest", "C1", f"at {rows[0].at_longest['context']:,} tokens"),
    ):
        entries = [getattr(row, at) for row in ranked]
        ranking.errorbar(
            [entry["loss"] for entry in entries],
            range(len(ranked)),
            xerr=[2 * (entry.get("standard_error") or 0) for entry in entries],
            fmt=marker,
            color=colour,
            markersize=5,
            label=title,
        )
    ranking.set_yticks(range(len(ranked)), [row.name for row in ranked])
    for label, row in zip(ranking.get_yticklabels(), ranked, strict=True):
        if row is rows[0]:
            label.set(color=STRONG, fontweight="bold")
    ranking.invert_yaxis()
    ranking.set(title="loss of the same held-out tokens, ± 2 standard errors", xlabel="nats a token")
    ranking.grid(alpha=0.3)
    ranking.legend()
    for row in reversed(rows):
        own = row is rows[0]
        training.plot(
            *_validation(row, folder),
            color=STRONG if own else PALE,
            alpha=1 if own else 0.35,
            linewidth=2.5 if own else 1,
        )
    training.set(title=f"validation loss while training, {rows[0].name} strong", xlabel="step", ylabel="nats a token")
    training.grid(alpha=0.3)
    return figure


def _costs(rows: list[Row]) -> Any:
    figure = new_figure(17, 0.9 + (0.45 if len(rows) <= COLOURS else 0.26) * len(rows))
    bars = {
        "training, tokens/s": [row.train_tokens_per_second or 0 for row in rows],
        "peak memory, MiB": [row.peak_memory_bytes / 2**20 for row in rows],
        "writing, tokens/s": [row.decode_tokens_per_second or 0 for row in rows],
        "writing by modules, tokens/s": [row.module_tokens_per_second or 0 for row in rows],
        "state, KiB": [row.state_bytes / 1024 for row in rows],
    }
    for number, (axis, (title, values)) in enumerate(zip(figure.subplots(1, len(bars)), bars.items(), strict=True)):
        colours = [STRONG if row is rows[0] else PALE for row in rows]
        drawn = axis.barh([row.name for row in rows], values, color=colours)
        axis.bar_label(drawn, fmt="{:,.0f}", padding=2, fontsize="small")
        axis.set_title(title)
        axis.margins(x=0.25, y=0.01)
        axis.invert_yaxis()
        if number:
            axis.set_yticklabels([])
    return figure
