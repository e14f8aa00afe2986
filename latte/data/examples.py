"""Examples with labels, as tokens of any lengths, and batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from latte.data.arrays import Arrays
from latte.data.packing import Batch
from latte.errors import UserError


@dataclass(frozen=True)
class Examples:
    """Tokens of example n are ``ids[starts[n]:starts[n + 1]]``; pairs have a second document each."""

    ids: np.ndarray
    starts: np.ndarray
    labels: np.ndarray
    pair_ids: np.ndarray | None = None
    pair_starts: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def tokens(self, index: int) -> np.ndarray:
        return np.asarray(self.ids[self.starts[index] : self.starts[index + 1]])

    def pair_tokens(self, index: int) -> np.ndarray:
        assert self.pair_ids is not None
        assert self.pair_starts is not None
        return np.asarray(self.pair_ids[self.pair_starts[index] : self.pair_starts[index + 1]])

    def select(self, rows: Sequence[int] | np.ndarray) -> Examples:
        """Some of them, in another order."""
        first = ragged(self.tokens(int(row)) for row in rows)
        second = (None, None) if self.pair_ids is None else ragged(self.pair_tokens(int(row)) for row in rows)
        return Examples(*first, np.asarray(self.labels)[np.asarray(rows, np.int64)], *second)

    def arrays(self) -> Arrays:
        """The fields that there are."""
        found = {"ids": self.ids, "starts": self.starts, "labels": self.labels}
        if self.pair_ids is not None and self.pair_starts is not None:
            found |= {"pair_ids": self.pair_ids, "pair_starts": self.pair_starts}
        return found


def ragged(rows: Iterable[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Rows one after another, and where each begins; the last number is the end."""
    found = list(rows)
    starts = np.concatenate([[0], np.cumsum([len(row) for row in found])]).astype(np.int64)
    return (np.concatenate(found) if found else np.zeros(0, np.uint8)), starts


class ExampleRows:
    """Batches of examples, cut to ``length`` tokens and padded to the longest of the batch."""

    def __init__(self, examples: Examples, length: int) -> None:
        self.examples, self.length = examples, length

    def __len__(self) -> int:
        return len(self.examples)

    def batch(self, rows: Sequence[int]) -> Batch:
        """``input_ids`` (B, T), ``labels`` (B,), ``attention_mask`` where lengths differ; for pairs, theirs as well."""
        batch = self._padded("", [self.examples.tokens(row) for row in rows])
        if self.examples.pair_ids is not None:
            batch |= self._padded("pair_", [self.examples.pair_tokens(row) for row in rows])
        return {**batch, "labels": torch.from_numpy(np.asarray(self.examples.labels)[list(rows)].astype(np.int64))}

    def _padded(self, prefix: str, documents: list[np.ndarray]) -> dict[str, Tensor]:
        cut = [document[: self.length] for document in documents]
        longest = max(len(document) for document in cut)
        ids = np.zeros((len(cut), longest), np.int64)
        mask = np.zeros((len(cut), longest), bool)
        for row, document in enumerate(cut):
            ids[row, : len(document)], mask[row, : len(document)] = document, True
        found = {f"{prefix}input_ids": torch.from_numpy(ids)}
        return found if mask.all() else {**found, f"{prefix}attention_mask": torch.from_numpy(mask.astype(np.int64))}


def check_labels(labels: np.ndarray, classes: int, where: str, *, every: bool = True) -> None:
    """Compare labels with the number of classes.

    Args:
        every: each class must have an example.

    Raises:
        UserError: a label out of range, or a class without examples.
    """
    if not len(labels):
        raise UserError(f"{where} has no examples")
    outside = labels[(labels < 0) | (labels >= classes)]
    if len(outside):
        raise UserError(f"{where} has the label {int(outside[0])}, expected 0 to {classes - 1}: set classify.classes")
    empty = np.nonzero(np.bincount(labels, minlength=classes) == 0)[0]
    if every and len(empty):
        raise UserError(f"{where} has no example of class {int(empty[0])}, expected some of each of {classes} classes")
