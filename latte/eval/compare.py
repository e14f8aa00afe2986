"""The same budget for several models, and what each makes of it: quality, speed, memory, size of state."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from latte import mixers
from latte.data import prepare
from latte.errors import Stopped, UserError
from latte.eval.decode_timing import random_ids, read_context, time_tokens
from latte.eval.generate import Reader, stream_text
from latte.eval.run import default_contexts, read_text
from latte.eval.stream import evaluate, longest_context, state_bytes
from latte.files import digest_json, write_text
from latte.loading import load
from latte.loading.layout import COMPARED, EVAL, RESULT, SAMPLES
from latte.models import VARIANTS, LatteConfig, LatteForCausalLM, preset
from latte.recipe import CompareRecipe, EvalRecipe, GenerateRecipe, Recipe, to_yaml
from latte.train import train

Say = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """One model's line of the comparison."""

    name: str
    parameters: int
    tokens: int
    valid_loss: float
    perplexity: float  # at the training length
    bits_per_byte: float
    train_tokens_per_second: float
    peak_memory_bytes: int
    decode_tokens_per_second: float
    state_bytes: int  # after decode_context tokens, one row
    contexts: list[dict[str, Any]]
    positions: list[dict[str, Any]]


def compare(recipe: CompareRecipe, say: Say = lambda message: None) -> list[Row]:
    """Train, evaluate and measure every model, one after another; what was done before is not done again.

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
    """The training recipe of every model, widths matched if that is asked for.

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
    """Size of the vocabulary: the tokens are made before anything is trained, and shared by all."""
    return len(prepare(recipe.data).tokenizer)


def count_parameters(variant: str, overrides: dict[str, Any], size: str, extra: dict[str, Any]) -> int:
    """Parameters of a model, without making their memory."""
    try:
        config = preset(variant, size, **{**extra, **overrides})
    except (ValueError, TypeError) as error:
        raise UserError(f"{variant}: {error}") from error
    with torch.device("meta"):
        model = LatteForCausalLM(config)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(name: str, settings: Recipe, recipe: CompareRecipe) -> Row:
    """Quality at all contexts, speed of writing and size of state of a run's final model; also its sample."""
    model, tokenizer = load(settings.out)
    asked = EvalRecipe(
        model=settings.out,
        max_tokens=recipe.eval_tokens,
        min_document_tokens=recipe.min_document_tokens,
        join_documents=recipe.join_documents,
    )
    limit = longest_context(model)
    contexts = recipe.eval_contexts or default_contexts(asked, model)
    trained = settings.data.sequence_length
    contexts = [context for context in {*contexts, trained} if limit is None or context <= limit]
    quality = evaluate(model, read_text(asked, tokenizer), contexts)
    folder = Path(settings.out)
    write_text(folder / EVAL, json.dumps({"model": settings.out, **asdict(quality)}, indent=1) + "\n")
    if recipe.sample_tokens:
        _sample(folder, model, tokenizer, recipe)
    at_training = next(entry for entry in quality.contexts if entry.context == trained)
    result = json.loads((folder / RESULT).read_text())
    speed, held = decode_speed(model, min(recipe.decode_context, limit or recipe.decode_context), recipe.decode_tokens)
    return Row(
        name=name,
        parameters=result["parameters"],
        tokens=result["tokens"],
        valid_loss=result["valid_loss"],
        perplexity=at_training.perplexity,
        bits_per_byte=at_training.bits_per_byte,
        train_tokens_per_second=result["tokens_per_second"],
        peak_memory_bytes=result["peak_memory_bytes"],
        decode_tokens_per_second=speed,
        state_bytes=held,
        contexts=[asdict(entry) for entry in quality.contexts],
        positions=[asdict(entry) for entry in quality.positions],
    )


def decode_speed(model: Any, context: int, tokens: int) -> tuple[float, int]:
    """Tokens per second of one row, and the bytes of its state, over the last ``tokens`` of a context."""
    tokens = min(tokens, context - 1)
    ids = random_ids(model, context)
    cache = read_context(model, ids[:, : context - tokens], chunk=512)
    seconds, cache = time_tokens(model, cache, ids[:, context - tokens :])
    return tokens / max(sum(seconds), 1e-9), state_bytes(cache)


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
        process.terminate()  # it saves and ends, and the next call goes on with it
        process.wait()
        raise
    if code > 128:
        raise Stopped(f"the training of {folder.name} was stopped and saved: the same command goes on", code - 128)
    if code != 0:
        raise UserError(f"the training of {folder.name} failed; its own message is above")


def _sample(folder: Path, model: Any, tokenizer: Any, recipe: CompareRecipe) -> None:
    reader = Reader(model, tokenizer)
    reader.read_blocks(iter([recipe.sample_prompt]))
    limit = longest_context(model)
    count = recipe.sample_tokens if limit is None else min(recipe.sample_tokens, limit - reader.count)
    text = "".join(stream_text(reader, GenerateRecipe(max_new_tokens=max(0, count))))
    write_text(folder / SAMPLES, json.dumps([{"prompt": recipe.sample_prompt, "text": text}], indent=1) + "\n")


def _measuring(recipe: CompareRecipe) -> dict[str, Any]:
    names = ("eval_tokens", "eval_contexts", "min_document_tokens", "join_documents", "decode_context", "decode_tokens")
    return {name: getattr(recipe, name) for name in (*names, "sample_prompt", "sample_tokens")}
