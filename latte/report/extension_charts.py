"""The lines of an extension's charts, computed from its ``results.json``; the page and the plots draw them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from latte.eval.extension import EXTENDED, ORIGINAL, SINKS, WINDOW
from latte.report.runs import position_points

#: Colour of each model in all figures, as an index into the page's series, in the order in which they are listed.
COLORS = {EXTENDED: 0, ORIGINAL: 1, SINKS: 2, WINDOW: 3}
#: Colour of each moment of training; only the first stage is measured before it as well.
MOMENTS = {"before": 6, "after transfer": 4, "after distil": 7, "after lengthen": 5}
#: Models whose perplexity stays the same however long the text is: they determine how tall a chart is.
STEADY = (EXTENDED, SINKS)
#: Colour of each figure of the stage remember.
REMEMBERED = {"attention captured": 0, "deviance explained by scores": 4}
#: Colour of each way to spend memory.
WAYS = dict(zip(("all together", "original", "window and sinks", "window", "kept", "oracle"), range(6), strict=True))
WAYS |= {"hybrid": 6, "latents": 7}
FIRST_TOKENS = 16  # their loss is high for want of context: they do not make a chart taller

Points = list[tuple[float, float]]


class Chart(NamedTuple):
    """Lines by name, and the value at which a chart is cut off; None if it shows all."""

    lines: dict[str, Points]
    top: float | None = None


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


def remember_chart(results: dict[str, Any]) -> Chart:
    """By layer: attention behind the window that kept tokens get, and how well their scores are predicted."""
    found = results.get("remember", [])
    lines = {
        name: _finite((line["layer"] + 1, line.get(key)) for line in found)
        for name, key in zip(REMEMBERED, ("captured", "explained"), strict=True)
    }
    return Chart(_drawn(lines))


def frontier_charts(results: dict[str, Any]) -> dict[str, Chart]:
    """Against bytes of state, a line for each way: gap closed by text, and mean recall of one fact over all depths."""
    rows = results.get("frontier", {}).get("rows", [])
    charts = {}
    for text in results.get("frontier", {}).get("documents", {}):
        values = [(row, row["texts"].get(text, {}).get("gap_closed")) for row in rows]
        charts[f"gap closed, {text}"] = _by_way(values)
    if any(row.get("recall") for row in rows):
        charts["one fact recalled"] = _by_way([(row, mean_recall(row)) for row in rows])
    return {name: chart for name, chart in charts.items() if chart.lines}


def mean_recall(row: dict[str, Any]) -> float | None:
    """Recall of one fact, the mean over all depths; None if it was not measured."""
    cells = list((row.get("recall") or {}).values())
    return sum(cell["recall"] for cell in cells) / len(cells) if cells else None


def _by_way(values: list[tuple[dict[str, Any], float | None]]) -> Chart:
    lines = {name: _finite((row["bytes"], value) for row, value in values if row["way"] == name) for name in WAYS}
    return Chart(_drawn(lines))


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
    """Milliseconds per decoded token, and bytes of state, by length of context."""
    found = results.get("decoding", {})
    time = {name: _points(found.get(name, {}), "seconds_per_token", 1e3) for name in COLORS}
    state = {name: _points(found.get(name, {}), "state_bytes") for name in COLORS}
    return Chart(_drawn(time)), Chart(_drawn(state))


def by_length(found: dict[str, Any], key: str) -> dict[int, float]:
    """One figure by context, shortest first; only finite positive values, since they are drawn on log scales."""
    return {int(x): y for x, y in _positive((int(context), entry.get(key)) for context, entry in found.items())}


def _points(found: dict[str, Any], key: str, scale: float = 1.0) -> Points:
    return [(x, scale * y) for x, y in by_length(found, key).items()]


def _positive(pairs: Iterable[tuple[int, Any]]) -> Points:
    return [(x, y) for x, y in _finite(pairs) if y > 0]


def _finite(pairs: Iterable[tuple[int, Any]]) -> Points:
    return sorted((float(x), float(y)) for x, y in pairs if y is not None and math.isfinite(y))


def _drawn(lines: dict[str, Points]) -> dict[str, Points]:
    return {name: points for name, points in lines.items() if points}


def _cut(lines: dict[str, Points], room: float, start: float = 0.0) -> Chart:
    """A chart cut off a little above its steady lines, if other lines are higher."""
    lines = _drawn(lines)
    steady = [y for name in STEADY for x, y in lines.get(name, []) if x >= start]
    highest = max((y for points in lines.values() for _, y in points), default=0.0)
    top = room * max(steady) if steady else None
    return Chart(lines, top if top is not None and highest > top else None)
