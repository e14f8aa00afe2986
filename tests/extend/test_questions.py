"""Texts with questions: what they hold, and that they are not what retrieval is measured with."""

from __future__ import annotations

import re

import numpy as np
import pytest

from latte.eval import retrieval
from latte.extend.questions import CITIES, DAYS, FORMS, NAMES, SITES, THINGS, draw_facts, with_questions


def encode(text: str) -> list[int]:
    return [1000 + ord(letter) for letter in text]


def decode(ids: np.ndarray) -> str:
    return "".join(chr(token - 1000) for token in ids if token >= 1000)


@pytest.mark.parametrize("length", [900, 3000])
def test_facts_stand_in_the_text_and_are_repeated_at_its_end(length: int) -> None:
    text = np.arange(length) % 500
    row, asked = with_questions(text, encode, seed=3)
    assert len(row) == length
    assert row.dtype == text.dtype
    told, repeated = decode(row[:asked]), decode(row[asked:])
    facts = re.findall(r" [^.]+\.", told)
    assert len(facts) == length // 300
    assert sorted(facts) == sorted(re.findall(r" [^.]+\.", repeated))
    plain = row[:asked][row[:asked] < 1000]
    assert np.array_equal(plain, text[: len(plain)])
    assert (row[asked:] >= 1000).all()
    assert row[0] < 1000 or len(told) < asked  # text stands around them
    again, other = with_questions(text, encode, seed=3), with_questions(text, encode, seed=4)
    assert np.array_equal(row, again.ids)
    assert not np.array_equal(row, other.ids)


def test_a_row_without_room_is_a_fact_and_its_question() -> None:
    row, asked = with_questions(np.zeros(60, dtype=np.int64), encode, seed=0)
    assert len(row) == 60
    assert 0 < asked < 60
    assert (row >= 1000).all()


def test_questions_are_different_and_of_every_form() -> None:
    facts = draw_facts(300, np.random.default_rng(0))
    assert len(facts) == 300
    beginnings = [re.split(r"[{]", form)[0] for form, _ in FORMS if not form.startswith(" {")]
    assert all(any(fact.startswith(beginning) for fact in facts) for beginning in beginnings)


def test_nothing_that_retrieval_is_measured_with_is_fitted_on() -> None:
    measured = {*retrieval.WORDS, *retrieval.PLACES}
    assert not measured & {*NAMES, *SITES, *THINGS, *CITIES, *DAYS}
    asked = [task.question.split("{")[0].strip() for task in retrieval.TASKS.values()]
    assert not any(question in form for question in asked for form, _ in FORMS)
