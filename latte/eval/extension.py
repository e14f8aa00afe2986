"""Comparing an extended model with the pretrained one: perplexity by context, retrieval of a fact, cost of decoding."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from latte.eval.decode_timing import random_cache, random_ids, read_context, time_tokens
from latte.eval.judging import check_retrieval, check_texts, still_valid
from latte.eval.retrieval import ONE_FACT, retrieve
from latte.eval.stream import Text, evaluate, state_bytes
from latte.files import write_text
from latte.recipe import JudgeRecipe

ORIGINAL, WINDOW, SINKS, EXTENDED = "original", "window", "window and sinks", "extended"
GAP_CLOSED = "gap closed"  # a row of the results beside those of the four models
VALIDATION, LONG = "validation", "one long text"  # names of texts: the corpus's held-out part, and one document of it
RETRIEVAL = "retrieval"  # beside texts where contexts are listed that could not be measured
WARM_UP = 4  # tokens decoded before the timed ones


@dataclass(frozen=True)
class Contender:
    """A model to measure, and the longest context it is measured at."""

    name: str
    model: Any
    longest: int | None = None


def judge(
    contenders: list[Contender],
    tokenizer: PreTrainedTokenizerBase,
    texts: dict[str, Text],
    recipe: JudgeRecipe,
    file: Path,
    own_context: int,
    say: Callable[[str], None] = lambda message: None,
) -> dict[str, Any]:
    """Make all measurements, writing each to ``file`` at once: a restart makes only the missing or changed ones."""
    found: dict[str, Any] = still_valid(json.loads(file.read_text()) if file.is_file() else {}, texts, recipe)

    def once(key: str, measure: Callable[..., Any], *given: Any) -> None:
        if key not in found:
            say(key)
            found[key] = measure(*given)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_text(file, json.dumps(found, indent=1) + "\n")

    filler = next(iter(texts.values())).documents
    room = sum(map(len, filler))
    missing = unreached(texts, recipe)
    for which, beyond in missing.items():
        say(f"nothing at {_listed(beyond)} tokens on {which}: {_longest(which, texts, room)}")
    for who in contenders:
        lengths = recipe.contexts + recipe.long_contexts + recipe.retrieval_contexts
        within = who.longest or max(lengths, default=0)
        for name, text in texts.items():
            for length in contexts_for(who, name, recipe):
                if length <= within and length <= text.longest:
                    lost = who.name == ORIGINAL and name == LONG
                    part = one_stretch(text, length) if lost else text
                    once(f"perplexity of {who.name} on {name} at {length}", perplexity, who.model, part, length)
        if who.name != WINDOW:
            for length in (length for length in recipe.retrieval_contexts if length <= min(within, room)):
                for task in recipe.retrieval_tasks:
                    given = (who.model, tokenizer, filler, length, recipe.retrieval_trials, task)
                    once(retrieval_key(task, who.name, length), retrieve, *given)
        if who.name in (ORIGINAL, EXTENDED):
            for length in recipe.decode_contexts:
                once(f"decoding of {who.name} at {length}", decode_cost, who.model, length, recipe.decode_tokens)
    longest = next((who.longest for who in contenders if who.name == ORIGINAL), None)
    return {**summary(found, list(texts), recipe, own_context, longest), "unreached": missing}


def retrieval_key(task: str, name: str, context: int) -> str:
    """The name of a measurement of retrieval."""
    return f"retrieval {'' if task == ONE_FACT else f'of {task} '}by {name} at {context}"


def unreached(texts: dict[str, Text], recipe: JudgeRecipe) -> dict[str, list[int]]:
    """Context lengths that a text is too short for, by text: they are not measured."""
    asked = {name: recipe.long_contexts if name == LONG else recipe.contexts for name in texts}
    found = {name: [length for length in asked[name] if length > text.longest] for name, text in texts.items()}
    room = sum(map(len, next(iter(texts.values())).documents))
    found[RETRIEVAL] = [length for length in recipe.retrieval_contexts if length > room]
    return {name: lengths for name, lengths in found.items() if lengths}


def _longest(name: str, texts: dict[str, Text], room: int) -> str:
    return f"its text has {room:,}" if name == RETRIEVAL else f"its longest document has {texts[name].longest:,}"


def _listed(lengths: list[int]) -> str:
    return ", ".join(f"{length:,}" for length in lengths)


def check_judge(recipe: JudgeRecipe, tokenizer: PreTrainedTokenizerBase, texts: dict[str, Text]) -> None:
    """Refuse, before any training, what could not be measured after it.

    Raises:
        UserError: a text without tokens, or a context without room for a fact and a question.
    """
    check_texts(texts)
    check_retrieval(recipe, tokenizer)


def contexts_for(who: Contender, text: str, recipe: JudgeRecipe) -> list[int]:
    """Context lengths to measure a contender at on a text."""
    if text != LONG:
        return recipe.contexts
    if who.name == ORIGINAL:
        return [who.longest] if who.longest else []
    return recipe.long_contexts if who.name == EXTENDED else []


def one_stretch(text: Text, length: int) -> Text:
    """The beginning of the longest document."""
    longest = max(text.documents, key=len)
    part = longest[:length]
    return Text([part], round(text.num_bytes * len(part) / max(1, sum(map(len, text.documents)))))


def perplexity(model: Any, text: Text, context: int) -> dict[str, Any]:
    """Loss at one context length, and by position within it."""
    return asdict(evaluate(model, text, [context]))


def summary(
    found: dict[str, Any], texts: list[str], recipe: JudgeRecipe, own_context: int, longest: int | None = None
) -> dict[str, Any]:
    """The measurements by text, contender and context, and the closed part of the gap."""
    names = (ORIGINAL, WINDOW, SINKS, EXTENDED)
    perplexity: dict[str, Any] = {}
    positions: dict[str, Any] = {}
    for text in texts:
        rows = perplexity[text] = {}
        lengths = (*recipe.contexts, *recipe.long_contexts, *([] if longest is None else [longest]))
        measured = sorted(set(lengths))
        for name in names:
            for context in measured:
                entry = found.get(f"perplexity of {name} on {text} at {context}")
                if entry is not None:
                    rows.setdefault(name, {})[str(context)] = entry["contexts"][0]
                    positions.setdefault(text, {})[name] = entry["positions"]
        closed = {}
        for length in (str(context) for context in measured if context <= own_context):
            losses = [rows.get(name, {}).get(length, {}).get("loss") for name in (ORIGINAL, SINKS, EXTENDED)]
            if None not in losses and losses[1] != losses[0]:
                closed[length] = (losses[1] - losses[2]) / (losses[1] - losses[0])
        rows[GAP_CLOSED] = closed
    return {
        "perplexity": perplexity,
        "positions": positions,
        "retrieval": _retrieval(found, ONE_FACT, recipe),
        "retrieval_tasks": {
            task: _retrieval(found, task, recipe) for task in recipe.retrieval_tasks if task != ONE_FACT
        },
        "decoding": {
            name: {str(c): found[key] for c in recipe.decode_contexts if (key := f"decoding of {name} at {c}") in found}
            for name in (ORIGINAL, EXTENDED)
        },
        "own_context": own_context,
    }


def _retrieval(found: dict[str, Any], task: str, recipe: JudgeRecipe) -> dict[str, Any]:
    """Cells of a task by contender and context."""
    return {
        name: {str(c): found[key] for c in recipe.retrieval_contexts if (key := retrieval_key(task, name, c)) in found}
        for name in (ORIGINAL, WINDOW, SINKS, EXTENDED)
    }


def decode_cost(model: Any, context: int, tokens: int) -> dict[str, float]:
    """Median time of a token and bytes of state, ``context`` tokens into a text, after a warm-up."""
    ids = random_ids(model, context)
    extended = hasattr(model, "new_parameters")
    cache = read_context(model, ids, chunk=2048) if extended else random_cache(model, context)
    seconds, cache = time_tokens(model, cache, ids[:, -1:].expand(1, tokens + WARM_UP))
    return {"seconds_per_token": statistics.median(seconds[WARM_UP:]), "state_bytes": state_bytes(cache)}
