"""``latte compare`` from start to end: train several models on the same budget and measure each."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from latte import mixers
from latte.data import prepare
from latte.errors import Stopped, UserError
from latte.eval.comparison import Row, measure
from latte.files import digest_json, write_text
from latte.loading.layout import COMPARED
from latte.models import VARIANTS, LatteConfig, LatteForCausalLM, preset
from latte.recipe import CompareRecipe, Recipe, to_yaml
from latte.train import train

Say = Callable[[str], None]


def compare(recipe: CompareRecipe, say: Say = lambda message: None) -> list[Row]:
    """Train, evaluate and measure every model, one after another; finished ones are read from their folders.

    Raises:
        UserError: settings or text that can't be used, or a training that failed.
        Stopped: a signal came while training; everything is saved.
    """
    recipes = plan(recipe, vocabulary(recipe))
    rows = []
    for name, settings in recipes.items():
        kept = Path(settings.out) / COMPARED
        key = digest_json([asdict(settings), _measuring(recipe)])
        found = json.loads(kept.read_text()) if kept.is_file() else {}
        if found.get("key") != key:
            say(f"{name}: training")
            _train(settings, recipe.isolate)
            say(f"{name}: measuring")
            row = measure(name, settings, recipe)
            write_text(kept, json.dumps({"key": key, "row": asdict(row)}, indent=1) + "\n")
            found = {"row": asdict(row)}
        rows.append(Row(**found["row"]))
    return rows


def plan(recipe: CompareRecipe, vocab_size: int) -> dict[str, Recipe]:
    """The training recipe of every model, with matched MLP widths if the recipe says so.

    Raises:
        UserError: an unknown name or setting.
    """
    chosen = {name: _variant(name, recipe) for name in recipe.variants}
    extra = {"vocab_size": vocab_size, "max_position_embeddings": recipe.data.sequence_length}
    if recipe.match_parameters:
        counts = {name: count_parameters(*choice, recipe.model.size, extra) for name, choice in chosen.items()}
        target = counts[recipe.match] if recipe.match else max(counts.values())
        for name, (variant, overrides) in chosen.items():
            width = _matching_width(variant, overrides, recipe.model.size, extra, target)
            chosen[name] = (variant, {**overrides, "intermediate_size": width})
    return {
        name: Recipe(
            out=str(Path(recipe.out) / name),
            data=recipe.data,
            model=replace(recipe.model, variant=variant, overrides=overrides),
            train=recipe.train,
        )
        for name, (variant, overrides) in chosen.items()
    }


def vocabulary(recipe: CompareRecipe) -> int:
    """Size of the vocabulary; the corpus is tokenised here, before any training, and shared by all models."""
    return len(prepare(recipe.data).tokenizer)


def count_parameters(variant: str, overrides: dict[str, Any], size: str, extra: dict[str, Any]) -> int:
    """Number of a model's parameters, counted on the meta device, without allocating them."""
    try:
        config = preset(variant, size, **{**extra, **overrides})
    except (ValueError, TypeError) as error:
        raise UserError(f"{variant}: {error}") from error
    with torch.device("meta"):
        model = LatteForCausalLM(config)
    return sum(parameter.numel() for parameter in model.parameters())


def _variant(name: str, recipe: CompareRecipe) -> tuple[str, dict[str, Any]]:
    """A preset and overrides for a name; settings for all are left out where a mechanism has no such option."""
    own = dict(recipe.overrides.get(name, {}))
    if name in VARIANTS:
        variant, mixer = name, VARIANTS[name]["mixer"]
    elif name in mixers.names():
        variant, mixer, own = "transformer++", name, {"mixer": name, **own}
    else:
        known = ", ".join([*VARIANTS, *mixers.names()])
        raise UserError(f"there is no variant or mixer {name!r} to compare, expected some of {known}")
    known_names = {entry.name for entry in dataclasses.fields(LatteConfig)}
    options_class = mixers.mixer_class(mixer).Options
    options = (
        {entry.name for entry in dataclasses.fields(options_class)}
        if dataclasses.is_dataclass(options_class)
        else set()
    )
    windowless = "window" in options and not VARIANTS.get(name, {}).get("options", {}).get("window")
    shared = {}
    for key, value in recipe.model.overrides.items():
        if key in known_names or (key in options and not (key == "window" and windowless)):
            shared[key] = value
    own_options = {key: own.pop(key) for key in list(own) if key not in known_names} if "mixer" in own else {}
    if own_options:
        own = {**own, "mixer_options": own_options}
    return variant, {**shared, **own}


def _matching_width(variant: str, overrides: dict[str, Any], size: str, extra: dict[str, Any], target: int) -> int:
    """The MLP width, a multiple of 8, that brings the parameters nearest to ``target``: they grow linearly with it."""
    low, high = (
        count_parameters(variant, {**overrides, "intermediate_size": width}, size, extra) for width in (64, 128)
    )
    width = 64 + (target - low) * 64 / (high - low)
    return max(8, 8 * round(width / 8))


def _train(settings: Recipe, isolate: bool) -> None:
    if not isolate:
        train(settings)
        return
    folder = Path(settings.out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    settings_file = folder.parent / f"{folder.name}.yaml"
    write_text(settings_file, to_yaml(settings))
    command = [sys.executable, "-m", "latte.cli.main", "train", "--config", str(settings_file)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        code = process.wait()
    except BaseException:
        process.terminate()  # it saves a checkpoint and ends; the next call resumes it
        process.wait()
        raise
    if code > 128:
        raise Stopped(f"the training of {folder.name} was stopped and saved: the same command goes on", code - 128)
    if code != 0:
        raise UserError(f"the training of {folder.name} failed; its own message is above")


def _measuring(recipe: CompareRecipe) -> dict[str, Any]:
    names = ("eval_tokens", "eval_contexts", "min_document_tokens", "join_documents", "decode_context", "decode_tokens")
    return {name: getattr(recipe, name) for name in (*names, "sample_prompt", "sample_tokens")}
