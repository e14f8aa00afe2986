"""What came of an extension, to look at: one page with every figure of ``results.json``, and plots of the main ones."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from latte import __version__
from latte.extend.judge import EXTENDED, ORIGINAL, SINKS, WINDOW
from latte.report.page import render_page
from latte.report.runs import position_points

CLOSED = "gap closed"
#: One colour for each contender through all figures, in the order in which they are listed; the page's series.
COLORS = {EXTENDED: 0, ORIGINAL: 1, SINKS: 2, WINDOW: 3}
#: What training passed through; only the first stage is measured before it as well.
MOMENTS = {"before": 6, "after transfer": 4, "after distil": 7, "after lengthen": 5}
HEXES = ("#d55e00", "#0072b2", "#00805d", "#b65a90", "#b87f00", "#3f8fbf", "#55504b", "#7a6cc4")
#: Those whose perplexity stays what it was however long the text; they say how tall a chart has to be.
STEADY = (EXTENDED, SINKS)
HIGHEST = 1e30  # that a plot's scale can bear
FIRST_TOKENS = 16  # whose loss is that of having read nothing: they do not make a chart taller

Points = list[tuple[float, float]]


class Chart(NamedTuple):
    """Lines by name, and where to cut those that leave for the sky."""

    lines: dict[str, Points]
    top: float | None = None


def render_results(results: dict[str, Any]) -> str:
    """The figures of an extension as one HTML page that needs nothing else."""
    texts = results.get("perplexity", {})
    time, state = decoding_charts(results)
    data = {
        "facts": facts(results),
        "own": results.get("own_context") or None,
        "steady": STEADY,
        "texts": [
            {
                "name": text,
                "rows": _rows(results, text),
                "perplexity": _chart(perplexity_chart(results, text), COLORS, "tokens"),
                "positions": _chart(position_chart(results, text), COLORS, "tokens", FIRST_TOKENS),
                "closed": [[int(context), share] for context, share in _finite(rows.get(CLOSED, {}))],
            }
            for text, rows in texts.items()
        ],
        "contenders": [{"name": name, "color": COLORS[name]} for name in COLORS],
        "layers": _chart(layer_chart(results), MOMENTS),
        "progress": _chart(progress_chart(results), {name.removeprefix("after "): MOMENTS[name] for name in MOMENTS}),
        "retrieval": _retrieval(results),
        "time": _chart(time, COLORS),
        "state": _chart(state, COLORS),
        "settings": yaml.safe_dump(results.get("recipe", {}), sort_keys=False, allow_unicode=True),
    }
    name = str(results.get("name") or "A model")
    footer = f"<p>Made by latte {html.escape(__version__)}. This page is one file and loads nothing.</p>"
    return render_page(f"{name}, extended", "Latte extension", lead(results), footer, data, "extend.js")


def lead(results: dict[str, Any]) -> str:
    """What was made and how it came out, in a few sentences."""
    recipe = results.get("recipe", {})
    window, sinks = (f"{recipe.get(key, 0):,}" for key in ("window", "sinks"))
    text = (
        f"Its own attention still sees the last {window} tokens and the first {sinks}; "
        f"everything else comes through {recipe.get('latents', 0)} latents a head."
    )
    for name, rows in list(results.get("perplexity", {}).items())[:1]:
        found = {who: _by_length(rows.get(who, {}), "perplexity") for who in COLORS}
        mine, original = found[EXTENDED], found[ORIGINAL]
        within = [context for context in original if context in mine and context <= results.get("own_context", 0)]
        if within:
            near = max(within)
            text += f" On {name} at {near:,} tokens its perplexity is {_figure(mine[near])}"
            text += f", the original’s {_figure(original[near])}"
            text += f", with window and first tokens alone {_figure(found[SINKS][near])}" * (near in found[SINKS])
            text += "."
        if mine and (far := max(mine)) > max(within, default=0):
            text += (
                f" At {far:,} tokens it is {_figure(mine[far])}"
                if within
                else (f" On {name} at {far:,} tokens its perplexity is {_figure(mine[far])}")
            )
            text += f", the original’s {_figure(original[far])}." if far in original else "."
    time, state = (chart.lines for chart in decoding_charts(results))
    if EXTENDED in time and EXTENDED in state:
        length = time[EXTENDED][-1][0]
        text += f" After {length:,.0f} tokens it writes the next in {_cost(time, state, EXTENDED, length)}"
        both = length in dict(time.get(ORIGINAL, [])) and length in dict(state.get(ORIGINAL, []))
        text += f", the original in {_cost(time, state, ORIGINAL, length)}." if both else "."
    return text


def facts(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values under the title."""
    recipe, own = results.get("recipe", {}), results.get("own_context")
    found = [
        ("Made for", f"{own:,} tokens" if own else None),
        ("Window", f"{recipe['window']:,} tokens" if "window" in recipe else None),
        ("First tokens kept", recipe.get("sinks")),
        ("Latents a head", recipe.get("latents")),
    ]
    for stage in ("transfer", "distil", "lengthen"):
        settings = recipe.get(stage) or {}
        if steps := settings.get("steps"):
            size = " × ".join(f"{settings[key]:,}" for key in ("batch_size", "sequence_length") if settings.get(key))
            found.append((stage.capitalize(), f"{steps:,} steps" + (f" of {size}" if size else "")))
    return [(name, str(value)) for name, value in found if value not in (None, "")]


def perplexity_chart(results: dict[str, Any], text: str) -> Chart:
    """Perplexity by context, a line for each contender."""
    rows = results["perplexity"][text]
    return _cut({name: _points(rows.get(name, {}), "perplexity") for name in COLORS}, 2.0)


def position_chart(results: dict[str, Any], text: str) -> Chart:
    """Loss by position in the longest context of each contender."""
    found = results.get("positions", {}).get(text, {})
    lines = {
        name: [(x, y) for x, y in position_points(found.get(name, [])) if x > 0 and math.isfinite(y)] for name in COLORS
    }
    return _cut(lines, 1.15, FIRST_TOKENS)


def layer_chart(results: dict[str, Any]) -> Chart:
    """Each layer's distance from the pretrained one, before the first stage and after each."""
    lines: dict[str, list[float]] = {}
    for stage, found in results.get("layers", {}).items():
        if "layers_before" in found:
            lines.setdefault("before", found["layers_before"])
        lines[f"after {stage}"] = found.get("layers", [])
    return Chart(_drawn({name: _positive(enumerate(values, 1)) for name, values in lines.items()}))


def progress_chart(results: dict[str, Any]) -> Chart:
    """Part of the gap that is closed, by tokens read; each stage begins where the one before it ended."""
    lines: dict[str, Points] = {}
    last: Points = [(0.0, 0.0)]
    for stage, found in results.get("progress", {}).items():
        points = [(line["tokens"], line.get("valid_gap_closed")) for line in found]
        known = [(float(x), float(y)) for x, y in points if y is not None and math.isfinite(y)]
        if known:
            lines[stage] = last + known
            last = known[-1:]
    return Chart(lines)


def decoding_charts(results: dict[str, Any]) -> tuple[Chart, Chart]:
    """Milliseconds a token, and bytes of state, by how much was read before."""
    found = results.get("decoding", {})
    time = {name: _points(found.get(name, {}), "seconds_per_token", 1e3) for name in COLORS}
    state = {name: _points(found.get(name, {}), "state_bytes") for name in COLORS}
    return Chart(_drawn(time)), Chart(_drawn(state))


def write_plots(results: dict[str, Any], folder: Path) -> list[Path]:
    """perplexity.png, positions.png, layers.png, progress.png and decoding.png; what was not measured is left out."""
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
        "layers": [(layer_chart(results), {"title": "distance from the pretrained layer", "xlabel": "layer"})],
        "progress": [(progress_chart(results), {"title": "gap closed while teaching", "xlabel": "tokens read"})],
        "decoding": [
            (time, {"title": "writing a token, ms", **context}),
            (in_mib, {"title": "memory of the past, MiB", **context}),
        ],
    }
    written = []
    for name, charts in plots.items():
        drawn = [(chart, labels) for chart, labels in charts if chart.lines]
        if drawn:
            by_context = name not in ("layers", "progress")
            log = name not in ("positions", "progress")
            written.append(_plot(drawn, folder / f"{name}.png", own if by_context else 0, log))
    return written


def _plot(charts: list[tuple[Chart, dict[str, str]]], path: Path, own: int, log: bool) -> Path:
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
            color = HEXES[COLORS.get(name, MOMENTS.get(name, MOMENTS.get(f"after {name}", 5)))]
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
            axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
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


def _cut(lines: dict[str, Points], room: float, start: float = 0.0) -> Chart:
    """A chart as tall as its steady lines need, with some room, where others would make it taller."""
    lines = _drawn(lines)
    steady = [y for name in STEADY for x, y in lines.get(name, []) if x >= start]
    highest = max((y for points in lines.values() for _, y in points), default=0.0)
    top = room * max(steady) if steady else None
    return Chart(lines, top if top is not None and highest > top else None)


def _chart(chart: Chart, colors: dict[str, int], unit: str = "", start: float = 0.0) -> dict[str, Any]:
    above = []
    for name, points in chart.lines.items():
        x, y = max((point for point in points if point[0] >= start), key=lambda point: point[1], default=(0.0, 0.0))
        if chart.top is not None and y > chart.top:
            above.append(f"{name}, {_figure(y)} at {x:,.0f} {unit}")
    return {
        "lines": [
            {"name": name, "color": colors.get(name, 5), "points": [[_short(x), _short(y)] for x, y in points]}
            for name, points in chart.lines.items()
        ],
        "top": chart.top,
        "note": f"Above the frame: {'; '.join(above)}." if above else None,
    }


def _rows(results: dict[str, Any], text: str) -> list[dict[str, Any]]:
    """Every figure of a text, one contender at one context in each."""
    keys = ("perplexity", "loss", "bits_per_byte", "tokens_per_second", "state_bytes")
    found = results["perplexity"][text]
    return [
        {"contender": name, "context": int(context), **{key: _number(entry.get(key)) for key in keys}}
        for name in COLORS
        for context, entry in sorted(found.get(name, {}).items(), key=lambda item: int(item[0]))
    ]


def _retrieval(results: dict[str, Any]) -> dict[str, Any] | None:
    """Cells by contender, depth and context; None where nothing was asked for."""
    found = {name: rows for name in COLORS if (rows := results.get("retrieval", {}).get(name))}
    contexts = sorted({int(context) for rows in found.values() for context in rows})
    depths = sorted({float(depth) for rows in found.values() for cells in rows.values() for depth in cells})
    if not depths:
        return None
    cells = {
        name: [[_cell(rows.get(str(context), {}).get(str(depth))) for context in contexts] for depth in depths]
        for name, rows in found.items()
    }
    return {
        "contexts": contexts,
        "depths": depths,
        "trials": results.get("recipe", {}).get("judge", {}).get("retrieval_trials"),
        "contenders": [{"name": name, "color": COLORS[name], "cells": grid} for name, grid in cells.items()],
    }


def _cell(entry: dict[str, float] | None) -> list[float | None] | None:
    return None if entry is None else [_number(entry.get("recall")), _number(entry.get("log_probability"))]


def _by_length(found: dict[str, Any], key: str) -> dict[int, float]:
    """One figure by length, shortest first, where it is a number above zero: all of these are drawn on log scales."""
    return {int(x): y for x, y in _positive((int(context), entry.get(key)) for context, entry in found.items())}


def _points(found: dict[str, Any], key: str, scale: float = 1.0) -> Points:
    return [(x, scale * y) for x, y in _by_length(found, key).items()]


def _positive(pairs: Iterable[tuple[int, Any]]) -> Points:
    return sorted((float(x), float(y)) for x, y in pairs if y is not None and math.isfinite(y) and y > 0)


def _drawn(lines: dict[str, Points]) -> dict[str, Points]:
    return {name: points for name, points in lines.items() if points}


def _finite(found: dict[str, float]) -> list[tuple[str, float]]:
    pairs = [(context, _short(share)) for context, share in found.items() if math.isfinite(share)]
    return sorted(pairs, key=lambda pair: int(pair[0]))


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else _short(value)


def _short(value: float) -> float:
    return float(f"{float(value):.6g}")


def _figure(value: float) -> str:
    """Four digits or so: 4.06, 49.99, 498.2, 1,204; a power where there are more than six."""
    if value >= 1e6:
        return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:,.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def _cost(time: dict[str, Points], state: dict[str, Points], name: str, length: float) -> str:
    milliseconds, size = dict(time[name])[length], dict(state[name])[length]
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= limit:
            return f"{milliseconds:.3g} ms from {size / limit:.3g} {unit}"
    return f"{milliseconds:.3g} ms from {size:.0f} bytes"
