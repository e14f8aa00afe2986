"""Which tokens are scored: how many, of which documents, and how much of each."""

from __future__ import annotations

import numpy as np

from latte.data.tokenizer import byte_tokenizer
from latte.eval.run import take
from latte.recipe import EvalRecipe

DOCUMENTS = [np.full(size, ord(letter), dtype=np.int64) for letter, size in (("a", 30), ("b", 5), ("c", 40))]


def taken(**settings: object) -> list[int]:
    pairs = [(ids, len(ids)) for ids in DOCUMENTS]
    return [len(ids) for ids in take(pairs, byte_tokenizer(), EvalRecipe(**settings)).documents]


def test_documents_are_taken_until_the_tokens_are_enough_and_the_last_is_cut() -> None:
    assert taken(max_tokens=50) == [30, 5, 15]
    assert taken(max_tokens=20) == [20]


def test_short_documents_are_left_out_and_long_ones_cut() -> None:
    assert taken(max_tokens=60, min_document_tokens=10) == [30, 30]
    assert taken(max_tokens=60, max_document_tokens=10) == [10, 5, 10]
    assert taken(max_tokens=12, max_document_tokens=10) == [10, 2]


def test_joined_they_are_one() -> None:
    assert taken(max_tokens=60, max_document_tokens=10, join_documents=True) == [25]
