"""Texts with questions: facts stated in running text and repeated at its end, which shows what recalling them needs.

A text that is only read on tells which tokens help to predict the next ones. What a later question needs is another
thing: its attention to the statement that answers it. The facts here have other words and forms than those that
retrieval is measured with (:mod:`latte.eval.retrieval`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words("Anna Boris Clara Dmitri Elena Felix Greta Hugo Irene Jonas Karin Liam Marta Nadia Oscar Paula Rosa")
SITES = _words("library museum kitchen school station hospital theatre factory cellar attic office vault church hotel")
THINGS = _words(
    "lemon tiger piano rocket violin marble coffee banana hammer ladder spider velvet wagon zebra anchor basket cactus "
    "dragon engine feather guitar honey ivory jacket kettle lantern mirror needle oyster pepper rabbit saddle walnut"
)
CITIES = _words("Lisbon Oslo Cairo Lima Kyoto Vienna Dublin Quito Tunis Prague Boston Delhi Geneva Havana Madrid")
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
#: Beginnings of statements, and the lists that their last words come from; None: a number.
FORMS: tuple[tuple[str, tuple[str, ...] | None], ...] = (
    (" The password for the {site} is", THINGS),
    (" {name}'s favourite thing is the", THINGS),
    (" {name} was born in", CITIES),
    (" The key of the {site} lies under the", THINGS),
    (" The code for the {site} is", None),
    (" Please remember that {name} paid", None),
    (" The name of {name}'s dog is", NAMES),
    (" The owner of the {site} is", NAMES),
    (" The {site} opens on", DAYS),
    (" {name} hid the {thing} in the", SITES),
    (" The magic phrase of {name} is", THINGS),
    (" The telephone of the {site} is", None),
    (" {name} works as a guard at the", SITES),
    (" The best present for {name} is a", THINGS),
    (" The treasure in the {site} is a", THINGS),
    (" {name}'s train leaves for", CITIES),
    (" The special ingredient from {city} is", THINGS),
    (" The answer to the riddle of the {site} is", THINGS),
)
TOKENS_PER_FACT = 300  # of a row


class Asked(NamedTuple):
    """A row of text with facts; from token ``asked`` on, the facts are repeated."""

    ids: np.ndarray
    asked: int


def with_questions(ids: np.ndarray, encode: Callable[[str], list[int]], seed: int) -> Asked:
    """The row as it begins, with facts at random places in it and repeated in another order at its end: same length."""
    random = np.random.default_rng(seed)
    told = [encode(text) for text in draw_facts(max(1, len(ids) // TOKENS_PER_FACT), random)]
    statements = sum(map(len, told))
    text = ids[: max(0, len(ids) - 2 * statements)]
    cuts = np.sort(random.integers(0, len(text) + 1, len(told)))
    parts = [part for pair in zip(np.split(text, cuts), [*told, []], strict=True) for part in pair]
    asked = [token for nth in random.permutation(len(told)) for token in told[nth]]
    row = np.concatenate([*parts, asked]).astype(ids.dtype)[: len(ids)]
    return Asked(row, min(len(text) + statements, len(ids) - 1))


def draw_facts(count: int, random: np.random.Generator) -> list[str]:
    """Statements that differ in what stands before their last word, as long as there are enough."""
    found: dict[str, str] = {}
    for _ in range(20 * count):
        form, answers = FORMS[random.integers(len(FORMS))]
        words = {"name": NAMES, "site": SITES, "thing": THINGS, "city": CITIES}
        question = form.format(**{key: str(random.choice(values)) for key, values in words.items()})
        answer = str(random.integers(100, 100_000)) if answers is None else str(random.choice(answers))
        found.setdefault(question, f"{question} {answer}.")
        if len(found) == count:
            break
    return list(found.values())
