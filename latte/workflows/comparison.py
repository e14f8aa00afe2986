"""``latte compare`` from start to end: train several models on the same budget and measure each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from latte.data import Corpus, PackedRows, prepare
from latte.errors import Stopped, UserError
from latte.eval.comparison import Row, measure
from latte.files import digest_json, write_text
from latte.loading.layout import COMPARED, read_recipe
from latte.models import LatteForCausalLM, preset, variants
from latte.models.presets import shared_overrides
from latte.recipe import CompareRecipe, Recipe, anchored, flatten, require_same, to_yaml
from latte.train import train
from latte.train.run import with_tokenizer

Say = Callable[[str], None]


def compare(recipe: CompareRecipe, say: Say = lambda message: None) -> list[Row]:
    """Train, evaluate and measure every model, one after another; finished ones are read from their folders.

    Raises:
        UserError: settings or text that can't be used, or a training that failed.
        Stopped: a signal came while training; everything is saved.
    """
    recipe = anchored(recipe)
    corpus = prepare(recipe.data, say)
    check_text(recipe, corpus)
    recipes = plan(recipe, len(corpus.tokenizer))
    for settings in recipes.values():
        check_run(settings)
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
    """The training recipe of every model, with matched numbers of parameters if the recipe says so.

    Raises:
        UserError: an unknown name or setting.
    """
    chosen = {name: _variant(name, recipe) for name in recipe.variants}
    extra = {"vocab_size": vocab_size, "max_position_embeddings": recipe.data.sequence_length}
    # Counted in any case: a setting that a model does not take is found here, before the first training.
    counts = {name: count_parameters(*choice, recipe.model.size, extra) for name, choice in chosen.items()}
    if recipe.match_parameters:
        target = counts[recipe.match] if recipe.match else max(counts.values())
        for name, (variant, overrides) in chosen.items():
            matched = _matched(variant, overrides, recipe.model.size, extra, target)
            chosen[name] = (variant, {**overrides, **matched})
    return {
        name: Recipe(
            out=str(Path(recipe.out) / name),
            data=recipe.data,
            model=replace(recipe.model, variant=variant, overrides=overrides),
            train=recipe.train,
        )
        for name, (variant, overrides) in chosen.items()
    }


def check_text(recipe: CompareRecipe, corpus: Corpus) -> None:
    """Refuse, before any training, text that could not be measured on after it.

    Raises:
        UserError: no validation document is long enough.
    """
    longest = max((len(ids) for ids, _ in corpus.valid.documents()), default=0)
    if longest < max(2, recipe.min_document_tokens):
        raise UserError(
            f"min_document_tokens is {recipe.min_document_tokens}, but the longest validation document has {longest} "
            "tokens"
        )
    for part in (corpus.train, corpus.valid):
        PackedRows(part, recipe.data.sequence_length, "training part" if part is corpus.train else "validation part")


def check_run(settings: Recipe) -> None:
    """Refuse a folder of another run at once; of another number of steps too, since all have to read as much.

    Raises:
        UserError: the folder holds a run with other settings.
    """
    recorded = read_recipe(settings.out)
    if recorded is None:
        return
    mine = replace(settings, data=with_tokenizer(settings))
    require_same(flatten(mine), flatten(recorded), settings.out)
    if mine.train.steps != recorded.train.steps:
        raise UserError(
            f"{settings.out} was trained for {recorded.train.steps} steps, now {mine.train.steps}: give another --out, "
            "so that all models are trained alike"
        )


def count_parameters(variant: str, overrides: dict[str, Any], size: str, extra: dict[str, Any]) -> int:
    """Number of a model's parameters, counted on the meta device, without allocating them."""
    try:
        config = preset(variant, size, **{**extra, **overrides})
        with torch.device("meta"):
            model = LatteForCausalLM(config)
    except (ValueError, TypeError) as error:
        raise UserError(f"{variant}: {error}") from error
    return sum(parameter.numel() for parameter in model.parameters())


def _variant(name: str, recipe: CompareRecipe) -> tuple[str, dict[str, Any]]:
    """A preset and its overrides; settings for all are left out where a variant has no such option."""
    known = variants()
    if name not in known:
        raise UserError(f"there is no variant {name!r} to compare, expected some of {', '.join(known)}")
    shared = shared_overrides(name, recipe.model.size, recipe.model.overrides)
    return name, {**shared, **recipe.overrides.get(name, {})}


def _matched(variant: str, overrides: dict[str, Any], size: str, extra: dict[str, Any], target: int) -> dict[str, Any]:
    """The MLP width, a multiple of 8, that brings the parameters nearest to ``target``; without MLPs, the depth.

    Parameters grow linearly with either.
    """

    def count(name: str, value: int) -> int:
        return count_parameters(variant, {**overrides, name: value}, size, extra)

    for name, low, high, multiple in (("intermediate_size", 64, 128, 8), ("num_hidden_layers", 1, 2, 1)):
        few, many = count(name, low), count(name, high)
        if many > few:
            value = low + (target - few) * (high - low) / (many - few)
            return {name: max(multiple, multiple * round(value / multiple))}
    raise UserError(f"{variant}: its parameters depend neither on the MLP's width nor on depth: they can't be matched")


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
