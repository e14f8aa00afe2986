"""The frontier of an extension: several ways to spend the same memory, measured one by one and resumable."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

from latte.errors import UserError
from latte.eval.extension import LONG
from latte.eval.frontier import (
    CHUNK,
    HYBRID,
    KEPT,
    LATENTS,
    ORACLE,
    TOGETHER,
    WINDOW_OF,
    gap_closed,
    losses_of,
    stretches,
)
from latte.eval.gap import close_latents
from latte.eval.retrieval import DEPTHS, ONE_FACT, retrieve
from latte.eval.stream import Text
from latte.extend.model import LatteExtendedForCausalLM, convert
from latte.extend.remember import choose_by_attention_to_come
from latte.files import digest_json, write_text
from latte.loading import Original
from latte.recipe import ExtendRecipe
from latte.workflows.remembering import Remember

SETTINGS = "settings"
BEST, BASE = "original", "window and sinks"  # the ends of the gap


class Way(NamedTuple):
    """A way to spend memory: its name and how many tokens it sees itself; None: all of the text."""

    name: str
    tokens: int | None


def ways(recipe: ExtendRecipe) -> list[Way]:
    """The ends of the gap, then every way at every memory that it can have; those with latents if they are trained."""
    own, trained = recipe.window + recipe.sinks, bool(recipe.stages())
    found = [Way(BEST, None), Way(BASE, own)]
    for tokens in sorted(set(recipe.judge.frontier)):
        found += [Way(WINDOW_OF, tokens)] if tokens > own else []
        if recipe.kept and tokens > own:
            # A hybrid has no scores for layers that keep their attention.
            untrained = [Way(HYBRID, tokens)] if recipe.full_layers else [Way(KEPT, tokens), Way(ORACLE, tokens)]
            found += [*untrained, *([Way(TOGETHER, tokens)] if trained else [])]
    return [*found, Way(LATENTS, own)] if trained else found


def check_frontier(recipe: ExtendRecipe, texts: dict[str, Text], own_context: int) -> None:
    """Refuse, before any training, what could not be compared after it.

    Raises:
        UserError: a memory of no more than the window and sinks, a context that no text has or the model can't read.
    """
    judge, own = recipe.judge, recipe.window + recipe.sinks
    if not judge.frontier:
        return
    for tokens in judge.frontier:
        if not own < tokens < judge.frontier_context:
            raise UserError(
                f"judge.frontier has {tokens}, expected more than the {own} tokens of window and sinks and fewer than "
                f"judge.frontier_context ({judge.frontier_context})"
            )
    if own_context and judge.frontier_context > own_context:
        raise UserError(
            f"judge.frontier_context is {judge.frontier_context}, expected at most {own_context}, which the model was "
            "made for: the gap is that to the model with everything in sight"
        )
    for name, text in texts.items():
        if name != LONG and not stretches(text, judge.frontier_context, 1):
            raise UserError(
                f"judge.frontier_context is {judge.frontier_context}, and no document of {name} is longer than "
                f"{text.longest:,} tokens: give a shorter one"
            )


def measure_frontier(
    original: Original,
    model: LatteExtendedForCausalLM,
    options: dict[str, Any],
    recipe: ExtendRecipe,
    remember: Remember | None,
    texts: dict[str, Text],
    file: Path,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """All ways on all texts, each written to ``file`` at once: a restart measures only what is missing.

    Returns the context, the number of stretches of each text, and a row for each way: its tokens in sight, bytes of
    state, loss and closed part of the gap by text with standard errors, and recall of one fact by depth.
    """
    judge = recipe.judge
    if not judge.frontier:
        return {}
    pieces = {
        name: stretches(text, judge.frontier_context, judge.frontier_documents)
        for name, text in texts.items()
        if name != LONG
    }
    settings = digest_json(
        [judge.frontier_context, judge.retrieval_trials, DEPTHS]
        + [[name, [piece.tolist() for piece in found]] for name, found in pieces.items()]
    )
    found: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    if found.get(SETTINGS) != settings:
        found = {SETTINGS: settings}
    for name, parts in pieces.items():
        if len(parts) < judge.frontier_documents:
            say(f"frontier: {len(parts)} stretches of {name}, for more than that give a larger judge.max_tokens")
    filler = next(iter(texts.values())).documents
    made = lru_cache(maxsize=1)(lambda way: model_of(way, original, model, options, recipe, remember))
    rows = []
    for way in ways(recipe):
        row: dict[str, Any] = {"way": way.name, "tokens": way.tokens, "texts": {}}

        def once(key: str, measure: Callable[[Any], Any], way: Way = way) -> Any:
            if key not in found:
                say(key)
                found[key] = measure(made(way))
                write_text(file, json.dumps(found) + "\n")
            return found[key]

        label = way.name if way.tokens is None else f"{way.name} of {way.tokens} tokens"
        for name, parts in pieces.items():
            # The oracle looks at what comes later: it has to see all at once.
            chunk = judge.frontier_context if way.name == ORACLE else CHUNK
            losses, row["bytes"] = once(f"frontier: {label} on {name}", _losses(parts, chunk))
            row["texts"][name] = {"loss": mean(losses), "losses": losses}
        if judge.frontier_recall and way.name != ORACLE:  # the question comes after the choice
            given = (original.tokenizer, filler, judge.frontier_context, judge.retrieval_trials, ONE_FACT)
            row["recall"] = once(f"frontier: recall of {label}", _recall(given))
        rows.append(row)
    best, base = (next(row for row in rows if row["way"] == name)["texts"] for name in (BEST, BASE))
    for row in rows:
        for name, figures in row["texts"].items():
            figures |= gap_closed(base[name]["losses"], best[name]["losses"], figures["losses"]) or {}
    documents = {name: len(parts) for name, parts in pieces.items()}
    return {"context": judge.frontier_context, "documents": documents, "rows": rows}


def _losses(parts: list[np.ndarray], chunk: int) -> Callable[[Any], Any]:
    return lambda model: losses_of(model, parts, chunk)


def _recall(given: tuple[Any, ...]) -> Callable[[Any], Any]:
    return lambda model: retrieve(model, *given)


def model_of(
    way: Way,
    original: Original,
    model: LatteExtendedForCausalLM,
    options: dict[str, Any],
    recipe: ExtendRecipe,
    remember: Remember | None,
) -> Any:
    """The model of a way, in eval mode."""
    if way.tokens is None:
        return original.model.eval()
    if way.name in (BASE, WINDOW_OF):
        window = {**options, "kept": 0, "window": way.tokens - recipe.sinks}
        return convert(copy.deepcopy(original.model), window).eval()
    kept = way.tokens - recipe.window - recipe.sinks
    changed = convert(copy.deepcopy(original.model), {**options, "kept": kept}, model.config.full_layers or ())
    taught = model.state_dict()
    changed.load_state_dict({name: taught[name] for name in changed.state_dict()})
    if remember is not None and kept != recipe.kept:
        remember.set_lifetimes(changed)
    if way.name in (KEPT, ORACLE, HYBRID):
        close_latents(changed)
    if way.name == ORACLE:
        choose_by_attention_to_come(changed)
    return changed.eval()
