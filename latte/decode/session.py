"""A session: one cache's way through a model's program, token by token, in memory of its own."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from latte.decode.memory import SessionMemory
from latte.decode.program import SPARE, Program
from latte.models.cache import ModelState
from latte.ops import native

#: Waking threads is not worth it for less than this many multiply-adds.
LEAST_WORK = 200_000


class DecodeSession:
    """States of a batch of rows in memory that tokens are read into; what others see are copies.

    It knows where states lie but not the model: any program of the same layout may use it.
    """

    def __init__(self, program: Program, state: ModelState) -> None:
        self._call = native.Call()
        self._room = torch.empty(0, device="cpu")
        self._program_words = 0
        self._most_rows = 0
        with torch.inference_mode(False), torch.no_grad():
            self.memory = SessionMemory(program.layout, state.count_B.shape[0])
            self.memory.load(state)

    def serves(self, program: Program) -> bool:
        return self.memory.layout.same(program.layout)

    @property
    def batch(self) -> int:
        return self.memory.batch

    @property
    def longest(self) -> int:
        """Tokens that the longest row has read."""
        return self.memory.longest

    def counts(self) -> Tensor:
        with torch.inference_mode(False):
            return self.memory.count_B.clone()

    def state(self) -> ModelState:
        # Tensors made in inference mode could not be used for training afterwards.
        with torch.inference_mode(False), torch.no_grad():
            return self.memory.state()

    def take_back(self, tokens: int) -> bool:
        with torch.inference_mode(False):
            return self.memory.take_back(tokens)

    def read(self, program: Program, x: Tensor, history: int = 1) -> Tensor:
        """T tokens a row: logits (B, T, words), or hidden states (B, T, D) after the last norm.

        x: ids (B, T), or without an embedding its rows (B, T, D). What a token gives does not depend, to the last bit,
        on the other rows, nor on T. The caller has checked all.
        """
        memory, (B, T) = self.memory, x.shape[:2]
        x = x.contiguous() if T == 1 or B == 1 else x.transpose(0, 1).contiguous()  # (T, B) in memory
        y_TB = torch.empty((T, B, program.output), dtype=program.layout.dtype, device="cpu")
        with torch.inference_mode(False):
            before, after = memory.advance(T, min(history, SPARE))
        self._prepare(program, B * T)
        threads = torch.get_num_threads() if program.work * B * T >= LEAST_WORK else 1
        self._call.set(
            threads=threads,
            B=B,
            T=T,
            input=x.data_ptr(),
            output=y_TB.data_ptr(),
            before=before,
            after=after,
            block=memory.block_bytes,
            memory=ctypes.addressof(memory.memory_words),
        )
        self._call.run()
        with torch.inference_mode(False):
            memory.read(T)
        return y_TB.transpose(0, 1)

    def _prepare(self, program: Program, rows: int) -> None:
        """What stays from token to token."""
        words = program.words[1]
        address = ctypes.addressof(words)
        if address == self._program_words and rows <= self._most_rows:
            return
        self._program_words, self._most_rows = address, rows
        self._room = torch.empty(rows * program.room + 16, dtype=program.layout.dtype, device="cpu")
        aligned = -(-self._room.data_ptr() // 64) * 64
        self._call.set(
            is_double=int(program.layout.dtype == torch.float64),
            program=address,
            length=len(words),
            room=aligned,
            count=self.memory.count_B.data_ptr(),
            partial=program.partial,
        )
