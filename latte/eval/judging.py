"""Before and after the settings of a judgement change: what can be refused at once, and what must be measured again."""

from __future__ import annotations

import hashlib
from typing import Any

from transformers import PreTrainedTokenizerBase

from latte.errors import UserError
from latte.eval.retrieval import DEPTHS, longest_trial
from latte.eval.stream import Text
from latte.files import digest_json
from latte.recipe import JudgeRecipe

SETTINGS = "settings"  # the key of the digests in the file of measurements


def check_texts(texts: dict[str, Text]) -> None:
    """Refuse a text that nothing can be measured on.

    Raises:
        UserError: it has no document of two tokens.
    """
    for name, text in texts.items():
        if not any(len(document) > 1 for document in text.documents):
            raise UserError(f"there is no text to measure on in {name}")


def check_retrieval(recipe: JudgeRecipe, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse retrieval contexts that are too short for what is stated and the question.

    Raises:
        UserError: a context without room.
    """
    longest = longest_trial(tokenizer, recipe.retrieval_tasks, recipe.retrieval_trials)
    for context in recipe.retrieval_contexts:
        if context <= longest:
            raise UserError(
                f"judge.retrieval_contexts has {context}, expected more than {longest}, the tokens of what is stated "
                "and the question"
            )


def still_valid(found: dict[str, Any], texts: dict[str, Text], recipe: JudgeRecipe) -> dict[str, Any]:
    """Earlier measurements without those whose text or settings are others now, and the digests of these.

    Measurements from before there were digests are kept: their settings could not change.
    """
    digests = {name: _digest(text) for name, text in texts.items()}
    now = {f"perplexity of {{}} on {name} at": digest for name, digest in digests.items()}
    retrieval = digest_json([recipe.retrieval_trials, DEPTHS, next(iter(digests.values()))])
    now |= {"retrieval by": retrieval, "retrieval of": retrieval}
    now |= {"decoding of": digest_json(recipe.decode_tokens)}
    before = found.get(SETTINGS, now)
    changed = [kind for kind, digest in now.items() if before.get(kind) != digest]
    kept = {key: value for key, value in found.items() if not any(_is_of(key, kind) for kind in changed)}
    return {**kept, SETTINGS: now}


def _is_of(key: str, kind: str) -> bool:
    first, _, last = kind.partition("{}")
    return key.startswith(first) and last in key


def _digest(text: Text) -> str:
    total = hashlib.sha256()
    for document in text.documents:
        total.update(document.astype("int64").tobytes() + b"|")
    return total.hexdigest()
