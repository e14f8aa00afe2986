"""A run on disk: results.json with everything, summary.md to read, and the plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from latte.bench import memory
from latte.bench.acceptance import Row, rows
from latte.bench.figures import Figure
from latte.bench.machine import Peaks
from latte.files import write_text

FORMAT = "latte-bench-1"


def write(folder: Path, machine: dict[str, Any], peaks: Peaks, figures: Sequence[Figure], command: str) -> list[Path]:
    """Write all files of a run and return their paths."""
    from latte.bench.plots import draw

    folder.mkdir(parents=True, exist_ok=True)
    table = rows(figures)
    document = {
        "format": FORMAT,
        "command": command,
        "machine": machine,
        "peaks": peaks.__dict__,
        "acceptance": [row.__dict__ for row in table],
        "figures": [figure.to_json() for figure in figures],
    }
    write_text(folder / "results.json", json.dumps(document, indent=1) + "\n")
    plots = draw(figures, folder)
    write_text(folder / "summary.md", markdown(machine, peaks, figures, table, command, plots))
    return [folder / "results.json", folder / "summary.md", *plots]


def markdown(
    machine: dict[str, Any],
    peaks: Peaks,
    figures: Sequence[Figure],
    table: Sequence[Row],
    command: str,
    plots: Sequence[Path] = (),
) -> str:
    """The summary: the machine, the targets, then every figure."""
    lines = ["# Benchmark", "", f"`{command}`, {machine['date']}.", ""]
    lines += [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, "
        f"{machine['isa']}, kernels: {machine['kernels']}, {machine['threads']} threads, "
        f"memory from {machine['allocator']}; "
        + ", ".join(
            f"{name} {machine[name]}"
            for name in ("python", "torch", "transformers", "jax", "mambapy")
            if name in machine
        )
        + f". Load before the run: {machine['load_before']}.",
        "",
        f"Measured in this run: float32 matrix product {peaks.matmul_flops / 1e9:.0f} GFLOP/s, "
        f"reading memory {peaks.read_bytes / 1e9:.1f} GB/s. Times are the best of several, taken in turns.",
        "",
        "| point | what | measured | target | |",
        "|---|---|---|---|---|",
    ]
    verdicts = {True: "met", False: "**not met**", None: "-"}
    lines += [f"| {r.point} | {r.text} | {r.measured} | {r.target} | {verdicts[r.met]} |" for r in table]
    lines.append("")
    lines += [line for path in plots for line in (f"![{path.stem}]({path.name})", "")]
    groups = dict.fromkeys((f.suite, f.kind) for f in figures)
    for suite, kind in groups:
        mine = [f for f in figures if (f.suite, f.kind) == (suite, kind)]
        lines += [f"## {suite}: {kind}", "", *_grid(mine), ""]
        notes = dict.fromkeys(f"{f.name} at {f.length}: {f.skipped}" for f in mine if f.skipped)
        lines += [*(f"- skipped: {note}" for note in notes), ""] if notes else []
    return "\n".join(lines).rstrip() + "\n"


def _grid(figures: Sequence[Figure]) -> list[str]:
    """Lengths down, names across: the best, the median, and shares of the machine's peaks where they are known."""
    names = list(dict.fromkeys(f.name for f in figures))
    lengths = sorted({f.length for f in figures})
    cells = {(f.length, f.name): _cell(f) for f in figures}
    lines = ["| T | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    lines += [f"| {t} | " + " | ".join(cells.get((t, name), "") for name in names) + " |" for t in lengths]
    return lines


def _cell(figure: Figure) -> str:
    if figure.best is None:
        return "-"
    if figure.kind == "memory":
        return memory.describe(figure)
    if figure.kind == "share":
        return f"{100 * figure.extra['share']:.1f}%"
    if figure.kind == "read":
        return f"{figure.extra['tokens_per_second']:,.0f} tokens/s"
    text = _time(figure.best)
    if figure.median is not None and figure.repeats > 1:
        text += f" (median {_time(figure.median)})"
    shares = [(figure.share_of_matmul, "matmul"), (figure.share_of_bandwidth, "memory")]
    known = [f"{100 * share:.0f}% of {what}" for share, what in shares if share is not None]
    return text + ("; " + ", ".join(known) if known else "")


def _time(seconds: float) -> str:
    return (
        f"{seconds * 1e3:.2f} ms"
        if seconds < 0.1
        else f"{seconds * 1e3:.0f} ms"
        if seconds < 10
        else f"{seconds:.1f} s"
    )
