"""The main charts of an extension as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latte.extras import need
from latte.report.extension_charts import (
    COLORS,
    MOMENTS,
    REMEMBERED,
    WAYS,
    Chart,
    decoding_charts,
    frontier_charts,
    layer_chart,
    perplexity_chart,
    position_chart,
    progress_chart,
    remember_chart,
)

#: The page's series as colours.
HEXES = ("#d55e00", "#0072b2", "#00805d", "#b65a90", "#b87f00", "#3f8fbf", "#55504b", "#7a6cc4")
INDEX = {**COLORS, **MOMENTS, **REMEMBERED, **WAYS}  # of the colour of every line
HIGHEST = 1e30  # larger values overflow the axis


def write_plots(results: dict[str, Any], folder: Path) -> list[Path]:
    """perplexity.png, positions.png, remember.png, layers.png, progress.png, decoding.png and frontier.png.

    What was not measured is left out.
    """
    texts, own = list(results.get("perplexity", {})), results.get("own_context") or 0
    time, state = decoding_charts(results)
    in_mib = Chart({name: [(x, y / 2**20) for x, y in points] for name, points in state.lines.items()})
    context = {"xlabel": "context (tokens)"}
    plots = {
        "perplexity": [
            (perplexity_chart(results, text), {"title": f"perplexity on {text}", **context}) for text in texts
        ],
        "positions": [
            (
                position_chart(results, text),
                {"title": f"loss by position, {text}", "xlabel": "tokens before", "ylabel": "nats a token"},
            )
            for text in texts
        ],
        "remember": [(remember_chart(results), {"title": "tokens kept behind the window", "xlabel": "layer"})],
        "layers": [(layer_chart(results), {"title": "distance from the pretrained layer", "xlabel": "layer"})],
        "progress": [(progress_chart(results), {"title": "gap closed while teaching", "xlabel": "tokens read"})],
        "frontier": [
            (_in_mib(chart), {"title": name, "xlabel": "memory of the past (MiB)"})
            for name, chart in frontier_charts(results).items()
        ],
        "decoding": [
            (time, {"title": "writing a token, ms", **context}),
            (in_mib, {"title": "memory of the past, MiB", **context}),
        ],
    }
    written = []
    for name, charts in plots.items():
        drawn = [(chart, labels) for chart, labels in charts if chart.lines]
        if drawn:
            by_context = name in ("perplexity", "positions", "decoding")
            log = name in ("perplexity", "layers", "decoding")
            written.append(_plot(drawn, folder / f"{name}.png", own if by_context else 0, log))
    return written


def _in_mib(chart: Chart) -> Chart:
    return Chart({name: [(x / 2**20, y) for x, y in points] for name, points in chart.lines.items()})


def _plot(charts: list[tuple[Chart, dict[str, str]]], path: Path, own: int, log: bool) -> Path:
    need("matplotlib", "a plot")
    from matplotlib.figure import Figure  # drawn without pyplot: no display, no global state
    from matplotlib.ticker import LogFormatter, MaxNLocator, NullFormatter, PercentFormatter, ScalarFormatter

    columns = min(3, len(charts))
    rows = -(-len(charts) // columns)
    figure = Figure(figsize=(1.5 + 5 * columns, 4.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis in axes[len(charts) :]:
        axis.set_visible(False)
    for axis, (chart, labels) in zip(axes, charts, strict=False):
        for name, points in chart.lines.items():
            color = HEXES[INDEX.get(name, MOMENTS.get(f"after {name}", 5))]
            style = "--" if name == "before" else "-"
            x, y = [x for x, _ in points], [min(y, HIGHEST) for _, y in points]
            axis.plot(x, y, label=name, color=color, linestyle=style, marker="o", markersize=4)
        axis.set(**labels)
        axis.grid(alpha=0.3)
        if log:
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(LogFormatter())
            axis.yaxis.set_minor_formatter(LogFormatter())
        if labels["xlabel"] == "tokens read":
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        elif labels["xlabel"] == "layer":
            if not log:
                axis.yaxis.set_major_formatter(PercentFormatter(1.0))
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
            if labels["xlabel"].startswith("memory"):
                axis.yaxis.set_major_formatter(PercentFormatter(1.0))
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(ScalarFormatter())
            axis.xaxis.set_minor_formatter(NullFormatter())
            lengths = [x for points in chart.lines.values() for x, _ in points]
            if min(lengths) <= own <= max(lengths):
                axis.axvline(own, color="gray", linestyle=":", linewidth=1, label=f"made for {own:,}")
        if chart.top is not None:
            lowest = min(y for points in chart.lines.values() for _, y in points)
            axis.set_ylim(lowest * (lowest / chart.top) ** 0.06, chart.top)
    axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return path
