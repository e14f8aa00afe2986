"""The plots of a run: time and memory against length, decoding against context, and what a layer's time goes into."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latte.bench.figures import Figure
from latte.extras import need

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


def _canvas(**settings: Any) -> Canvas:
    """An empty drawing, made without pyplot: no display, no global state."""
    return need("matplotlib.figure", "a plot").Figure(**settings)


def draw(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Write one file for each kind of figure that there is."""
    paths = []
    measured = [f for f in figures if f.best is not None]
    for suite in ("ops", "layers", "models"):
        mine = [f for f in measured if f.suite == suite and f.kind in ("forward", "training")]
        if mine:
            paths.append(_save(_times(suite, mine), folder / f"{suite}.png"))
    decoded = [f for f in measured if f.kind == "decode"]
    if decoded:
        canvas = _canvas(figsize=(7, 4.5), layout="constrained")
        axis = canvas.subplots()
        _lines(axis, decoded, 1e3)
        axis.set(
            title="decoding at batch 1", xlabel="tokens read before", ylabel="ms a token", xscale="log", yscale="log"
        )
        paths.append(_save(_finish(canvas, [axis]), folder / "decode.png"))
    raced = [f for f in measured if f.suite == "race" and f.kind == "write"]
    if raced:
        canvas = _canvas(figsize=(7, 4.5), layout="constrained")
        axis = canvas.subplots()
        _lines(axis, raced, 1e3)
        axis.set(title="writing, beside llama.cpp", xlabel="tokens read before", ylabel="ms a token", yscale="log")
        paths.append(_save(_finish(canvas, [axis]), folder / "race.png"))
    held = [f for f in measured if f.kind == "memory"]
    if held:
        canvas = _canvas(figsize=(7, 4.5), layout="constrained")
        axis = canvas.subplots()
        _lines(axis, held, 2**-20)
        axis.set(title="peak memory of a training step", xlabel="tokens", ylabel="MiB", xscale="log", yscale="log")
        paths.append(_save(_finish(canvas, [axis]), folder / "memory.png"))
    shares = sorted((f for f in measured if f.kind == "share"), key=lambda f: f.length)
    if shares:
        paths.append(_save(_shares(shares), folder / "shares.png"))
    return paths


def _times(suite: str, figures: list[Figure]) -> Canvas:
    """The paper's figure 7: time against length, both logarithmic, forward beside training."""
    canvas = _canvas(figsize=(13, 5), layout="constrained")
    axes = canvas.subplots(1, 2, sharex=True)
    titles = {"forward": "forward", "training": "forward and backward"}
    for axis, (kind, title) in zip(axes, titles.items(), strict=True):
        _lines(axis, [f for f in figures if f.kind == kind], 1e3)
        axis.set(title=f"{suite}: {title}", xlabel="tokens", ylabel="ms", xscale="log", yscale="log")
    return _finish(canvas, axes)


def _lines(axis: Any, figures: list[Figure], factor: float) -> None:
    for number, name in enumerate(dict.fromkeys(f.name for f in figures)):
        line = sorted((f for f in figures if f.name == name), key=lambda f: f.length)
        style = (
            {"linewidth": 2.2, "marker": "o"} if line[0].ours else {"linewidth": 1.2, "marker": "x", "linestyle": "--"}
        )
        axis.plot(
            [f.length for f in line],
            [(f.best or 0.0) * factor for f in line],
            label=name,
            color=f"C{number % 10}",
            **style,
        )


def _shares(figures: list[Figure]) -> Canvas:
    canvas = _canvas(figsize=(7, 4.5), layout="constrained")
    axis = canvas.subplots()
    places = range(len(figures))
    bottom = [0.0] * len(figures)
    for part in ("projections", "mixing", "rest"):
        heights = [100 * f.extra[part] / f.extra["layer"] for f in figures]
        axis.bar(places, heights, bottom=bottom, label=part)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axis.axhline(20, color="black", linewidth=0.8, linestyle=":")
    axis.set_xticks(list(places), [str(f.length) for f in figures], rotation=45)
    axis.set(title="where a layer's forward time goes", xlabel="tokens", ylabel="%")
    axis.legend(fontsize="small")
    return canvas


def _finish(canvas: Canvas, axes: Any) -> Canvas:
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3, which="both")
        if axis.has_data():
            axis.legend(fontsize="small")
    return canvas


def _save(canvas: Canvas, path: Path) -> Path:
    canvas.savefig(path, dpi=120)
    return path
