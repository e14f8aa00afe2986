"""Examples of multi-query associative recall (MQAR), draw by draw those of Zoology's generator."""

from __future__ import annotations

import numpy as np

from latte.data.packing import IGNORE


def recall_examples(
    vocab_size: int, length: int, pairs: int, examples: int, seed: int, power: float = 0.01
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and labels, (examples, length) each: ``pairs`` keys with their values, then each key once more, as a query.

    Keys are distinct and from 1 to vocab_size / 2 - 1, values distinct and from there to vocab_size - 1. A query stands
    at an even place behind the pairs; the n-th such place has a weight proportional to n^(power - 1), and places are
    drawn without replacement. All other tokens are 0. The label of a query is its value, which the ids never repeat;
    all other labels are -100.
    """
    # RandomState: numpy guarantees its stream for ever, and Zoology's seeds are seeds of it.
    chance = np.random.RandomState(seed)
    prefix, half = 2 * pairs, vocab_size // 2
    places = (length - prefix) // 2
    weights = power * np.arange(1, places + 1) ** (power - 1)
    weights = weights / weights.sum()

    def draw(count: int, first: int, p: np.ndarray | None = None) -> np.ndarray:
        drawn = [chance.choice(count, size=pairs, replace=False, p=p) for _ in range(examples)]
        return first + np.stack(drawn)

    keys, values = draw(half - 1, 1), draw(vocab_size - half, half)
    asked = prefix + 2 * draw(places, 0, weights)
    ids = np.zeros((examples, length), np.int32)
    ids[:, 0:prefix:2], ids[:, 1:prefix:2] = keys, values
    np.put_along_axis(ids, asked, keys.astype(np.int32), axis=1)
    labels = np.full((examples, length), IGNORE, np.int32)
    np.put_along_axis(labels, asked, values.astype(np.int32), axis=1)
    return ids, labels
