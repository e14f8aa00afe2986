"""Documents packed into rows of a fixed length; the rows of a step are a pure function of seed and step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from latte.data.corpus import CorpusPart
from latte.errors import UserError

IGNORE = -100
Batch = dict[str, Tensor]


class Rows(Protocol):
    """Examples that are read by their numbers, several as one batch."""

    def __len__(self) -> int: ...

    def batch(self, rows: Sequence[int]) -> Batch: ...


class PackedRows:
    """A part of a corpus cut into consecutive rows of ``length`` tokens; an incomplete last row is dropped.

    A document that does not fit into its row continues in the next one as a new segment: the first token of every row
    begins a segment.

    Args:
        part, setting: names of the part and of the setting of its length, for messages.

    Raises:
        UserError: fewer tokens than one row.
    """

    def __init__(
        self, tokens: CorpusPart, length: int, part: str = "corpus", setting: str = "data.sequence_length"
    ) -> None:
        self.tokens, self.length = tokens, length
        if len(tokens.ids) < length:
            larger = ", a larger data.valid_fraction" if part.startswith("validation") else ""
            raise UserError(
                f"the {part} has {len(tokens.ids)} tokens, fewer than one row of {length}: give more text{larger}, or "
                f"a {setting} of at most {len(tokens.ids)}"
            )

    def __len__(self) -> int:
        return len(self.tokens.ids) // self.length

    def batch(self, rows: Sequence[int]) -> Batch:
        """``input_ids``, ``labels`` and ``reset``, each (rows, length).

        The label of each segment's first token is -100, since no token before it predicts it.
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
    """The n-th row of training: every row once per epoch, each epoch in a different order."""

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows, self.seed = num_rows, seed

    def __getitem__(self, index: int) -> int:
        epoch, place = divmod(index, self.num_rows)
        return int(permutation(self.num_rows, self.seed, epoch)[place])

    def step(self, step: int, batch_size: int) -> list[int]:
        """The rows of one optimiser step, over all processes."""
        return [self[index] for index in range(step * batch_size, (step + 1) * batch_size)]


class GroupedOrder:
    """Rows in groups, group after group; the rows of a step are of one group, such as rows of one length.

    An epoch is a permutation of the batches of all groups; rows that do not fill a batch wait for another epoch.

    Raises:
        ValueError: a group is smaller than a batch.
    """

    def __init__(self, sizes: Sequence[int], seed: int) -> None:
        self.sizes, self.seed = list(sizes), seed

    def step(self, step: int, batch_size: int) -> list[int]:
        """The rows of one optimiser step, over all processes."""
        counts = [size // batch_size for size in self.sizes]
        if min(counts) < 1:
            raise ValueError(f"a group has {min(self.sizes)} rows, expected at least {batch_size}, those of a batch")
        epoch, place = divmod(step, sum(counts))
        batch = int(permutation(sum(counts), self.seed, epoch)[place])
        group = 0
        while batch >= counts[group]:
            batch, group = batch - counts[group], group + 1
        first = sum(self.sizes[:group])
        rows = permutation(self.sizes[group], self.seed + 1 + group, epoch)
        return [first + int(row) for row in rows[batch * batch_size : (batch + 1) * batch_size]]


@lru_cache(maxsize=8)
def permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """The numbers below ``num_rows`` in an order of their own for each seed and epoch."""
    # Philox is counter-based, and numpy guarantees the same stream on every machine and in every version.
    return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(num_rows)


class StepBatches(torch.utils.data.Dataset[Batch]):
    """Micro-batches of one process, numbered from the start of the run; number n belongs to step n // accumulation.

    The rows of a step are dealt to the processes in turn, so that any number of processes together reads the same rows.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        seed: int,
        steps: int,
        batch_size: int,
        micro_batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        order: Order | GroupedOrder | None = None,
    ) -> None:
        self.rows, self.order = rows, order or Order(len(rows), seed)
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
