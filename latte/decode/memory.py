"""The memory of a session: states of all layers as the kernel reads them, and states as values from it.

What every token replaces lies in blocks, one for each token read: a token reads one and writes the next, so the last
few tokens can be taken back. Keys and values stay where they are: in rings with slots to spare, or in memory that
grows.

A state that grows with the logarithm has room for as many levels as the mixer's options allow: 16 for documents of 2^15
tokens, so a session takes up to 16 times the memory of one level, in each block. A token reads and writes only levels
whose bit is set in the number of tokens read: half of log2 n on average.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latte.decode.program import SPARE, Kept, Layout, MixerLayout, Part
from latte.models.cache import ModelState
from latte.ops import native
from latte.state import State, require_state

#: Tokens that memory for keys and values which grow has room for at first.
FIRST_ROOM = 256


class SessionMemory:
    """States of ``batch`` rows.

    Attributes:
        count_B: tokens that each row has read.
        longest: the largest of them.
    """

    def __init__(self, layout: Layout, batch: int) -> None:
        self.layout, self.batch = layout, batch
        self._blocks = _bytes(2, layout.row_bytes * batch)
        self._now, self._behind = 0, 0  # the present block, and how many before it are still whole
        self.count_B = torch.zeros(batch, dtype=torch.long, device="cpu")
        self.longest = 0
        self._kept = [self._room(kept) for kept in layout.memories]
        self.memory_words: Any = None
        self._describe()

    @property
    def block_bytes(self) -> int:
        return self._blocks.shape[1]

    def advance(self, tokens: int, history: int) -> tuple[int, int]:
        """Make room for the states after so many tokens: addresses of the block before them, and of the first after.

        ``history`` tokens can be taken back afterwards, or all of these.
        """
        wanted = 1 + max(tokens, history)
        if self._blocks.shape[0] < wanted:
            blocks = _bytes(wanted, self.block_bytes)
            blocks[0].copy_(self._blocks[self._now])
            self._blocks, self._now, self._behind = blocks, 0, 0
        count, first = self._blocks.shape[0], self._now + 1
        if first + tokens > count:  # they must lie in a row
            if tokens > 1:
                self._blocks[0].copy_(self._blocks[self._now])
                self._now, self._behind, first = 0, 0, 1
            else:
                first = 0
        start, size = self._blocks.data_ptr(), self.block_bytes
        before = start + self._now * size
        self._now, self._behind = first + tokens - 1, min(self._behind, count - 1 - tokens) + tokens
        self._grow(tokens)
        return before, start + first * size

    def read(self, tokens: int) -> None:
        """Count the tokens of a call."""
        self.count_B += tokens
        self.longest += tokens

    def take_back(self, tokens: int) -> bool:
        """Forget the last tokens; False where their states are gone."""
        if tokens > min(self._behind, SPARE):
            return False
        self._now = (self._now - tokens) % self._blocks.shape[0]
        self._behind -= tokens
        self.read(-tokens)
        return True

    # From values to memory and back.

    def load(self, state: ModelState) -> None:
        """Take a state.

        Raises:
            ValueError: it is of another model.
        """
        self.count_B.copy_(state.count_B)
        self.longest = int(self.count_B.max())
        self._grow(0)
        for layout, states in zip(self.layout.layers, state.layers, strict=True):
            for mixer, given in zip(layout, states, strict=True):
                expected = mixer.empty.map(lambda tensor: tensor.expand(self.batch, *tensor.shape[1:]))
                tensors = dict(require_state(f"mixer {mixer.name!r}", given, expected).tensors())
                for part in mixer.parts:
                    self._load_part(part, tensors[part.path])
                for index in mixer.kept:
                    self._load_kept(index, tensors)

    def state(self) -> ModelState:
        """A copy of what was read so far, as a value."""
        layers = tuple(tuple(self._state(mixer) for mixer in layer) for layer in self.layout.layers)
        return ModelState(layers, self.count_B.clone())

    def _state(self, mixer: MixerLayout) -> State:
        tensors = {part.path: self._value(part) for part in mixer.parts}
        for index in mixer.kept:
            tensors |= self._kept_values(index)
        values = iter([tensors[path] for path, _ in mixer.empty.tensors()])
        return mixer.empty.map(lambda _: next(values))

    def _part(self, part: Part) -> Tensor:
        start = part.start * self.batch
        size = self.batch * torch.Size(part.shape).numel() * part.dtype.itemsize
        return self._blocks[self._now, start : start + size].view(part.dtype).view(self.batch, *part.shape)

    def _load_part(self, part: Part, given: Tensor) -> None:
        if not part.by_bits:
            self._part(part).copy_(given)
            return
        levels = self.longest.bit_length()
        if given.shape[1] < levels:
            raise ValueError(
                f"state has {given.shape[1]} levels, expected at least {levels} after {self.longest} tokens"
            )
        self._part(part)[:, :levels].copy_(given[:, : min(levels, part.shape[0])])

    def _value(self, part: Part) -> Tensor:
        if not part.by_bits:
            return self._part(part).clone()
        # What stands where a bit is 0 was never written, or is old.
        blocks = self._part(part)[:, : self.longest.bit_length()]
        live_BL = (self.count_B[:, None] >> torch.arange(blocks.shape[1], device="cpu") & 1).bool()
        return torch.where(live_BL[(...,) + (None,) * (blocks.dim() - 2)], blocks, 0.0)

    def _load_kept(self, index: int, tensors: dict[str, Tensor]) -> None:
        kept, (keys, values, sink_keys, sink_values) = self.layout.memories[index], self._kept[index]
        given = [tensors[path] for path in kept.paths]
        if kept.window is not None:
            for to, ring in ((keys, given[0]), (values, given[1])):
                if kept.window:
                    to.scatter_(2, self._slots(kept, ring.transpose(1, 2), to.shape[2]), ring.transpose(1, 2))
            sink_keys.copy_(given[2].transpose(1, 2))
            sink_values.copy_(given[3].transpose(1, 2))
            return
        live_BS = given[2]
        if not torch.equal(live_BS.sum(1), self.count_B):
            raise ValueError("the state holds other keys than its tokens', expected one for each token that was read")
        for row in range(self.batch):
            n, alive = int(self.count_B[row]), live_BS[row]
            for to, source in ((keys, given[0]), (values, given[1])):
                to[row, :, :n] = source[row, alive].transpose(0, 1)

    def _kept_values(self, index: int) -> dict[str, Tensor]:
        kept, (keys, values, sink_keys, sink_values) = self.layout.memories[index], self._kept[index]
        if kept.window is not None:
            seen = (x[:, :, : kept.window] for x in (keys, values))
            rings = [
                x.gather(2, self._slots(kept, part, x.shape[2])) if kept.window else part.clone()
                for x, part in zip((keys, values), seen, strict=True)
            ]
            if kept.chunked:
                read_BR = torch.arange(kept.window, device="cpu") < self._in_run(kept)
                rings = [torch.where(read_BR[:, None, :, None], ring, 0.0) for ring in rings]
            found = [*rings, sink_keys, sink_values]
            return {path: x.transpose(1, 2).clone() for path, x in zip(kept.paths, found, strict=True)}
        # Rows that have read less begin later.
        S, missing_B1 = self.longest, self.longest - self.count_B[:, None]
        live_BS = torch.arange(S, device="cpu") >= missing_B1
        both = [x[:, :, :S].transpose(1, 2).clone() for x in (keys, values)]
        for row in range(self.batch):
            missing = int(missing_B1[row])
            if missing:
                for x in both:
                    x[row] = x[row].roll(missing, dims=0)
                    x[row, :missing] = 0
        return dict(zip(kept.paths, (*both, live_BS), strict=True))

    def _in_run(self, kept: Kept) -> Tensor:
        """Tokens of each row's last run of window + 1 tokens (B, 1): none where it is complete."""
        return self.count_B[:, None] % ((kept.window or 0) + 1)

    def _slots(self, kept: Kept, ring_BGRK: Tensor, slots: int) -> Tensor:
        """For every number in a state's ring, the slot that it has in a ring of so many slots."""
        slot_R = torch.arange(ring_BGRK.shape[2], device="cpu")
        if kept.chunked:
            token_BR = self.count_B[:, None] - self._in_run(kept) + slot_R
        else:
            # The last token before `count` that belongs in each slot of the state's ring.
            last_B1 = self.count_B[:, None] - 1
            token_BR = last_B1 - (last_B1 - slot_R) % len(slot_R)
        return (token_BR % slots)[:, None, :, None].expand_as(ring_BGRK)

    def _room(self, kept: Kept, tokens: int = FIRST_ROOM) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        slots = tokens if kept.window is None else kept.window + SPARE
        widths = (kept.key_width, kept.value_width)
        sizes = [(self.batch, kept.groups, n, width) for n in (slots, kept.sinks) for width in widths]
        made = [torch.empty(size, dtype=self.layout.dtype, device="cpu") for size in sizes]
        return made[0], made[1], made[2], made[3]

    def _grow(self, tokens: int) -> None:
        """Room for the keys and values of so many more tokens."""
        for index, kept in enumerate(self.layout.memories):
            old, wanted = self._kept[index], self.longest + tokens
            if kept.window is not None or old[0].shape[2] >= wanted:
                continue
            new = self._room(kept, max(wanted, old[0].shape[2] * 3 // 2))
            for before, after in zip(old[:2], new[:2], strict=True):
                after[:, :, : before.shape[2]] = before
            self._kept[index] = new
            self.memory_words = None
        if self.memory_words is None:
            self._describe()

    def _describe(self) -> None:
        self.memory_words = native.words_of(native.memory_words(self._kept))


def _bytes(blocks: int, size: int) -> Tensor:
    return torch.empty(blocks, size, dtype=torch.uint8, device="cpu")
