"""Reading run folders for a report."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from latte.errors import UserError
from latte.loading.layout import (
    COMPARED,
    COMPARISON,
    CONFIG,
    EVAL,
    METRICS,
    RESULT,
    SAMPLES,
    TRAINING_SAMPLES,
    read_lines,
    read_metrics,
)

Points = list[tuple[float, float]]


class Unlogged(UserError):  # noqa: N818  (reads as what the run is)
    """A run that has begun and logged no loss yet."""


@dataclass
class RunView:
    """One run. Curves are (x, y) pairs; what was not measured is empty or None."""

    name: str
    folder: Path
    settings: str = ""  # the recipe, as YAML
    recipe: dict[str, Any] = field(default_factory=dict)
    train: Points = field(default_factory=list)  # tokens read, loss
    valid: Points = field(default_factory=list)
    accuracy: Points = field(default_factory=list)  # tokens read, accuracy on validation examples
    scores: list[dict[str, Any]] = field(default_factory=list)  # accuracy by group of test examples
    collapse: dict[str, dict[int, Points]] = field(default_factory=dict)  # use of latents: figure, layer, curve
    context: Points = field(default_factory=list)  # length of context, loss
    positions: Points = field(default_factory=list)  # position in the text, loss
    read: Points = field(default_factory=list)  # length of context, tokens a second
    decode: Points = field(default_factory=list)
    memory: Points = field(default_factory=list)  # length of context, bytes
    samples: list[dict[str, str]] = field(default_factory=list)  # prompt, text
    progress: list[dict[str, Any]] = field(default_factory=list)  # step, prompt and text, written while training
    row: dict[str, float | None] = field(default_factory=dict)  # its row of the table
    at_training: dict[str, Any] = field(default_factory=dict)  # figures at the length of training, of eval.json
    engine: str = ""  # what decoded: kernel or modules

    @property
    def variant(self) -> str:
        return str(self.setting("model", "variant") or self.name)

    @property
    def task(self) -> str:
        return str(self.recipe.get("task") or "language")

    def setting(self, group: str, name: str) -> Any:
        return (self.recipe.get(group) or {}).get(name)


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, or the runs in it.

    Raises:
        UserError: there is no folder, no run in it, or nothing was logged yet.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    for candidates in ([folder], sorted(path for path in folder.iterdir() if path.is_dir())):
        if any((path / METRICS).is_file() for path in candidates):
            found = [path for path in candidates if (path / METRICS).is_file() or (path / CONFIG).is_file()]
            order = [row.get("name") for row in _json(folder / COMPARISON) or []]
            return sorted(found, key=lambda path: order.index(path.name) if path.name in order else len(order))
        if any((path / CONFIG).is_file() for path in candidates):
            raise UserError(f"{folder} has no metrics yet: its training has not come to the first line of {METRICS}")
    raise UserError(f"{folder} is neither a run nor a folder of runs: there is no {METRICS} in it")


def read_run(folder: Path, name: str | None = None) -> RunView:
    """Read a run's files; nothing is computed.

    Raises:
        UserError: its metrics hold no loss, or a file is not what it should be.
    """
    recipe: dict[str, Any] = {}
    settings = ""
    if (folder / CONFIG).is_file():
        settings = (folder / CONFIG).read_text(encoding="utf-8")
        try:
            recipe = yaml.safe_load(settings) or {}
        except yaml.YAMLError as error:
            raise UserError(f"{folder / CONFIG} is not YAML") from error
    run = RunView(name or folder.resolve().name, folder, settings, recipe)
    lines = read_metrics(folder)
    per_step = next((line["tokens"] / line["step"] for line in lines if "tokens" in line and line.get("step")), 1.0)
    for line in lines:
        tokens = float(line.get("tokens", line.get("step", 0) * per_step))
        for key, points in (("loss", run.train), ("valid_loss", run.valid), ("valid_accuracy", run.accuracy)):
            if isinstance(line.get(key), int | float) and math.isfinite(line[key]):
                points.append((tokens, float(line[key])))
        for key in (key for key in line if key.startswith("latents_")):
            _, figure, layer = key.split("_")
            run.collapse.setdefault(figure, {}).setdefault(int(layer), []).append((tokens, float(line[key])))
    if not run.train and not run.valid:
        raise Unlogged(f"{folder} has no metrics yet: there is no loss in {METRICS}")
    result = _json(folder / RESULT) or {}
    run.row = {
        "parameters": result.get("parameters"),
        "valid_loss": result.get("valid_loss") or (run.valid[-1][1] if run.valid else None),
        "tokens_per_second": result.get("tokens_per_second"),
        "peak_memory": result.get("peak_memory_bytes"),
        "tokens": result.get("tokens") or max(x for x, _ in run.train + run.valid),
    }
    measured = _json(folder / EVAL) or {}
    run.scores = measured.get("scores", [])
    last = run.accuracy[-1][1] if run.accuracy else None  # until all test examples are read
    run.row |= {"accuracy": measured.get("accuracy", last), "chance": measured.get("chance")}
    contexts = measured.get("contexts", [])
    run.context = [(entry["context"], entry["loss"]) for entry in contexts]
    run.positions = position_points(measured.get("positions", []))
    compared = (_json(folder / COMPARED) or {}).get("row", {})
    # The table shows the training length; the curve shows the others.
    trained = compared.get("trained_context") or run.setting("data", "sequence_length")
    run.at_training = next((entry for entry in contexts if entry["context"] == trained), {})
    run.engine = compared.get("decode_engine") or ""
    run.row |= {
        "decode": compared.get("decode_tokens_per_second"),
        "module_decode": compared.get("module_tokens_per_second"),
        "state": compared.get("state_bytes"),
    }
    # Timed with all others in turns, which training was not.
    run.row["tokens_per_second"] = compared.get("train_tokens_per_second") or run.row["tokens_per_second"]
    run.samples = [{"prompt": entry["prompt"], "text": entry["text"]} for entry in _json(folder / SAMPLES) or []]
    run.progress = spaced(read_lines(folder / TRAINING_SAMPLES))
    return run


def spaced(lines: list[dict[str, Any]], most: int = 6) -> list[dict[str, Any]]:
    """At most ``most`` of them, evenly spaced, the first and the last among them."""
    if len(lines) <= most:
        return lines
    return [lines[round(index * (len(lines) - 1) / (most - 1))] for index in range(most)]


def position_points(bins: list[dict[str, Any]]) -> Points:
    """Each bin at its geometric middle. A last bin of less than half the width is merged into the one before."""
    if len(bins) > 2 and bins[-1]["last"] - bins[-1]["first"] < (bins[-2]["last"] - bins[-2]["first"]) / 2:
        before, rest = bins[-2:]
        tokens = before["tokens"] + rest["tokens"]
        loss = (before["loss"] * before["tokens"] + rest["loss"] * rest["tokens"]) / tokens
        bins = [*bins[:-2], {"first": before["first"], "last": rest["last"], "tokens": tokens, "loss": loss}]
    return [(math.sqrt(entry["first"] * entry["last"]), entry["loss"]) for entry in bins]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except ValueError as error:
        raise UserError(f"{path} is not JSON") from error
