"""Rows of a fixed length, packed with documents; which of them a step reads is a pure function of seed and step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from latte.data.corpus import CorpusPart
from latte.errors import UserError

IGNORE = -100
Batch = dict[str, Tensor]


class PackedRows:
    """A part of a corpus as rows of ``length`` tokens, one after another; what does not fill the last one is left out.

    A document longer than what is left of its row goes on in the next, which starts fresh: every row's first token
    begins a segment.

    Raises:
        UserError: fewer tokens than one row.
    """

    def __init__(self, tokens: CorpusPart, length: int, part: str = "corpus") -> None:
        self.tokens, self.length = tokens, length
        if len(tokens.ids) < length:
            raise UserError(
                f"the {part} has {len(tokens.ids)} tokens, fewer than one row of {length}: "
                f"give more text or a smaller data.sequence_length"
            )

    def __len__(self) -> int:
        return len(self.tokens.ids) // self.length

    def batch(self, rows: Sequence[int]) -> Batch:
        """``input_ids``, ``labels`` and ``reset``, each (rows, length).

        A label is -100 where nothing can predict it: the first token of each segment. So labels count what is learned.
        """
        ids = torch.from_numpy(
            np.stack([self.tokens.ids[row * self.length : (row + 1) * self.length].astype(np.int64) for row in rows])
        )
        reset = torch.from_numpy(np.stack([self._reset(row) for row in rows]))
        return {"input_ids": ids, "labels": ids.masked_fill(reset, IGNORE), "reset": reset}

    def _reset(self, row: int) -> np.ndarray:
        begin, end = row * self.length, (row + 1) * self.length
        starts = self.tokens.starts[:-1]
        inside = starts[np.searchsorted(starts, begin) : np.searchsorted(starts, end)]
        reset = np.zeros(self.length, dtype=bool)
        reset[0] = True
        reset[inside - begin] = True
        return reset


class Order:
    """Which row is the n-th to be read: every row once an epoch, each epoch in an order of its own."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows, self.seed = num_rows, seed

    def __getitem__(self, index: int) -> int:
        epoch, place = divmod(index, self.num_rows)
        return int(_permutation(self.num_rows, self.seed, epoch)[place])

    def step(self, step: int, batch_size: int) -> list[int]:
        """The rows of one optimiser step, over all processes."""
        return [self[index] for index in range(step * batch_size, (step + 1) * batch_size)]


@lru_cache(maxsize=2)
def _permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    # Philox is counter-based and its stream is fixed by numpy for good, on every machine.
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_rows)


class StepBatches(torch.utils.data.Dataset[Batch]):
    """Micro-batches of one process, numbered from the start of the run; number n belongs to step n // accumulation.

    A step's rows are dealt to processes in turn, so that however many there are, together they read the same rows.
    """

    def __init__(
        self,
        rows: PackedRows,
        *,
        seed: int,
        steps: int,
        batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.rows, self.order = rows, Order(len(rows), seed)
        self.steps, self.batch_size, self.micro = steps, batch_size, micro_batch_size
        self.rank, self.world_size = rank, world_size
        assert batch_size % (micro_batch_size * world_size) == 0, "the recipe is checked before"
        self.accumulation = batch_size // (micro_batch_size * world_size)

    def __len__(self) -> int:
        return self.steps * self.accumulation

    def __getitem__(self, index: int) -> Batch:
        step, micro = divmod(index, self.accumulation)
        mine = self.order.step(step, self.batch_size)[self.rank :: self.world_size]
        return self.rows.batch(mine[micro * self.micro : (micro + 1) * self.micro])
