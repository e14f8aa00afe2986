"""MQAR: draw by draw the examples of Zoology's generator, and the order that keeps a batch to one length."""

import hashlib

import numpy as np
import pytest

from latte.data import GroupedOrder
from latte.data.recall import recall_examples

#: SHA-256 of ids and labels (50 examples, little-endian int32) that Zoology's multiquery_ar gave at commit dbcb60d.
ZOOLOGY = {
    (8192, 64, 4, 0): "76d39ec5a3947060",
    (8192, 128, 8, 10): "7b996feb15509591",
    (64, 32, 3, 1): "e052e16d348966f9",
    (8192, 256, 16, 0): "a305dee0fb8c36bf",
    (8192, 512, 64, 10): "aedef5808cfd4194",
}


@pytest.mark.parametrize("drawn", ZOOLOGY)
def test_the_examples_are_those_of_zoology(drawn):
    vocab_size, length, pairs, seed = drawn
    ids, labels = recall_examples(vocab_size, length, pairs, 50, seed)
    both = ids.astype("<i4").tobytes() + labels.astype("<i4").tobytes()
    assert hashlib.sha256(both).hexdigest().startswith(ZOOLOGY[drawn])


def test_every_query_is_answered_by_the_value_of_its_key():
    ids, labels = recall_examples(128, 64, 8, 200, seed=3)
    for row, answers in zip(ids, labels, strict=True):
        values = dict(zip(row[0:16:2].tolist(), row[1:16:2].tolist(), strict=True))
        asked = np.nonzero(answers != -100)[0]
        assert len(values) == len(asked) == 8  # each key once, and asked for once
        assert all(values[int(row[place])] == answers[place] for place in asked)
        assert all(0 < key < 64 <= value < 128 for key, value in values.items())
        assert np.count_nonzero(row[16:]) == 8  # values are not repeated


def test_near_places_are_asked_at_more_often():
    _, labels = recall_examples(128, 64, 1, 4000, seed=0)
    places = np.nonzero(labels != -100)[1]
    weights = np.arange(1, 32) ** -0.99
    expected = 4000 * weights / weights.sum()
    counts = np.bincount((places - 2) // 2, minlength=31)
    assert ((counts - expected) ** 2 / expected).sum() < 61.1  # chi squared of 30 degrees of freedom, p = 0.001


def test_a_step_has_rows_of_one_group_and_an_epoch_all_batches():
    order = GroupedOrder([10, 7, 4], seed=1)
    epoch = [order.step(step, 3) for step in range(3 + 2 + 1)]
    assert [order.step(step, 3) for step in range(6)] == epoch
    groups = [{0 if row < 10 else 1 if row < 17 else 2 for row in rows} for rows in epoch]
    assert all(len(group) == 1 for group in groups)
    rows = [row for batch in epoch for row in batch]
    assert len(set(rows)) == len(rows) == 18
    assert [order.step(step, 3) for step in range(6, 12)] != epoch
    with pytest.raises(ValueError, match="a group has 4 rows, expected at least 5"):
        order.step(0, 5)
