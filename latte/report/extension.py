"""The page of an extension: every figure of its ``results.json``, as tables and charts."""

from __future__ import annotations

import html
import json
import math
from pathlib import Path
from typing import Any

import yaml

from latte import __version__
from latte.errors import UserError
from latte.eval.extension import EXTENDED, GAP_CLOSED, ORIGINAL, SINKS
from latte.loading.layout import EXTENSION_RESULTS, read_extension
from latte.recipe import STAGES
from latte.report.extension_charts import (
    COLORS,
    FIRST_TOKENS,
    MOMENTS,
    REMEMBERED,
    STEADY,
    WAYS,
    Chart,
    Points,
    by_length,
    decoding_charts,
    frontier_charts,
    layer_chart,
    mean_recall,
    perplexity_chart,
    position_chart,
    progress_chart,
    remember_chart,
)
from latte.report.model_card import scored_tokens
from latte.report.page import render_page


def report_of_extension(folder: Path) -> str | None:
    """The page of a folder that latte extend wrote; None if it is another folder.

    Raises:
        UserError: its figures can't be read.
    """
    if read_extension(folder) is None:
        return None
    try:
        return render_results(json.loads((folder / EXTENSION_RESULTS).read_text(encoding="utf-8")))
    except ValueError as error:
        raise UserError(f"{folder / EXTENSION_RESULTS} is not JSON") from error


def render_results(results: dict[str, Any]) -> str:
    """The results of an extension as one self-contained HTML page."""
    texts = results.get("perplexity", {})
    time, state = decoding_charts(results)
    data = {
        "facts": facts(results),
        "own": results.get("own_context") or None,
        "steady": STEADY,
        "texts": [
            {
                "name": text,
                "scored": scored_tokens(rows),
                "rows": _rows(results, text),
                "perplexity": _chart(perplexity_chart(results, text), COLORS, "tokens"),
                "positions": _chart(position_chart(results, text), COLORS, "tokens", FIRST_TOKENS),
                "closed": [[int(context), share] for context, share in _finite(rows.get(GAP_CLOSED, {}))],
            }
            for text, rows in texts.items()
        ],
        "contenders": [{"name": name, "color": COLORS[name]} for name in COLORS],
        "remember": _chart(remember_chart(results), REMEMBERED),
        "layers": _chart(layer_chart(results), MOMENTS),
        "progress": _chart(progress_chart(results), {name.removeprefix("after "): MOMENTS[name] for name in MOMENTS}),
        "frontier": _frontier(results),
        "retrieval": _retrieval(results),
        "time": _chart(time, COLORS),
        "state": _chart(state, COLORS),
        "settings": yaml.safe_dump(results.get("recipe", {}), sort_keys=False, allow_unicode=True),
    }
    name = str(results.get("name") or "A model")
    footer = f"<p>Made by latte {html.escape(__version__)}. This page is one file and loads nothing.</p>"
    return render_page(f"{name}, extended", "Latte extension", lead(results), footer, data, "extend.js")


def lead(results: dict[str, Any]) -> str:
    """The extended model and its main results, in a few sentences."""
    recipe = results.get("recipe", {})
    window, sinks = (f"{recipe.get(key, 0):,}" for key in ("window", "sinks"))
    kept = (
        f", the first {sinks} and the {recipe['kept']:,} best-scored"
        if recipe.get("kept")
        else f" and the first {sinks}"
    )
    text = (
        f"Its own attention still sees the last {window} tokens{kept}; "
        f"everything else comes through {recipe.get('latents', 0)} latents a head."
    )
    for name, rows in list(results.get("perplexity", {}).items())[:1]:
        found = {who: by_length(rows.get(who, {}), "perplexity") for who in COLORS}
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
        ("Tokens kept behind the window", f"{recipe['kept']:,}" if recipe.get("kept") else None),
        ("Latents a head", recipe.get("latents")),
    ]
    for stage in STAGES:
        settings = recipe.get(stage) or {}
        if steps := settings.get("steps"):
            size = " × ".join(f"{settings[key]:,}" for key in ("batch_size", "sequence_length") if settings.get(key))
            found.append((stage.capitalize(), f"{steps:,} steps" + (f" of {size}" if size else "")))
    if missing := results.get("unreached"):
        texts = (f"{name} at {', '.join(f'{length:,}' for length in lengths)}" for name, lengths in missing.items())
        found.append(("Not measured, text too short", "; ".join(texts)))
    return [(name, str(value)) for name, value in found if value not in (None, "")]


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
    """The table of a text: one row for each contender and context."""
    keys = ("perplexity", "loss", "bits_per_byte", "tokens_per_second", "state_bytes")
    found = results["perplexity"][text]
    return [
        {"contender": name, "context": int(context), **{key: _number(entry.get(key)) for key in keys}}
        for name in COLORS
        for context, entry in sorted(found.get(name, {}).items(), key=lambda item: int(item[0]))
    ]


def _frontier(results: dict[str, Any]) -> dict[str, Any] | None:
    """Charts against bytes of state, and the table of all ways; None if they were not compared."""
    found = results.get("frontier") or {}
    if not found:
        return None
    rows = []
    for row in found["rows"]:
        for text, figures in row["texts"].items():
            closed, error = (_number(figures.get(key)) for key in ("gap_closed", "standard_error"))
            cells = {"text": text, "loss": _number(figures["loss"]), "closed": closed, "error": error}
            rows.append({"way": row["way"], "tokens": row["tokens"], "bytes": row["bytes"], **cells})
            rows[-1]["recall"] = _number(mean_recall(row))
    return {
        "context": found["context"],
        "documents": found["documents"],
        "charts": [{"name": name, **_chart(chart, WAYS)} for name, chart in frontier_charts(results).items()],
        "rows": rows,
    }


def _retrieval(results: dict[str, Any]) -> dict[str, Any] | None:
    """Cells by contender, depth and context; None if retrieval was not measured."""
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


def _finite(found: dict[str, float]) -> list[tuple[str, float]]:
    pairs = [(context, _short(share)) for context, share in found.items() if math.isfinite(share)]
    return sorted(pairs, key=lambda pair: int(pair[0]))


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else _short(value)


def _short(value: float) -> float:
    return float(f"{float(value):.6g}")


def _figure(value: float) -> str:
    """About four digits: 4.06, 49.99, 498.2, 1,204; scientific notation from a million."""
    if value >= 1e6:
        return f"{value:.1e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:,.{2 if value < 100 else 1 if value < 1000 else 0}f}"


def _cost(time: dict[str, Points], state: dict[str, Points], name: str, length: float) -> str:
    milliseconds, size = dict(time[name])[length], dict(state[name])[length]
    for limit, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= limit:
            return f"{milliseconds:.3g} ms from {size / limit:.3g} {unit}"
    return f"{milliseconds:.3g} ms from {size:.0f} bytes"
