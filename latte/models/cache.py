"""What a model remembers between calls: its layers' states, in the shape that transformers' ``generate`` expects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from latte.state import State, state
from latte.tokens import Tokens

#: Reads the first so many tokens of a call again.
Reread = Callable[[int], object]
#: Calls whose states are kept while the past is recorded: more than a draft has tokens.
RECORDED = 256
#: Under what name a saved cache keeps its number of columns.
LENGTH = "length"


@state
class ModelState(State):
    """The states of all layers, a tuple for each, and how many tokens of its document each row has read."""

    layers: tuple[tuple[State, ...], ...]
    count_B: Tensor


class Session(Protocol):
    """Reads tokens into states in memory of its own; a decode engine makes it for a cache."""

    @property
    def batch(self) -> int: ...
    def counts(self) -> Tensor:
        """How many tokens of its document each row has read."""

    def state(self) -> ModelState:
        """A copy of the states."""

    def take_back(self, tokens: int) -> bool:
        """Forget the last tokens; False where that is not possible."""


class LatteCache(Cache):
    """A :class:`ModelState` that calls of a model replace as they read.

    The state is a value: it never changes. While a decode engine reads, the cache owns its :class:`Session`, and
    ``state`` is a copy that is made when someone asks for it. ``length`` counts the columns read, padding too.
    """

    def __init__(self, state: ModelState | None = None, length: int = 0) -> None:
        super().__init__(layers=[])
        self.session: Session | None
        self._state: ModelState | None
        self.history = 1  # tokens that a session shall be able to take back, beside those of its last call
        self.state = state
        self.length = length
        self._past: deque[tuple[ModelState | None, int, Reread]] | None = None

    @property
    def state(self) -> ModelState | None:
        """What was read so far; None before any token."""
        if self._state is None and self.session is not None:
            self._state = self.session.state()
        return self._state

    @state.setter
    def state(self, value: ModelState | None) -> None:
        self._state, self.session = value, None

    def __getstate__(self) -> dict[str, Any]:
        # Copies and files have the state, not the session's memory.
        return {**self.__dict__, "_state": self.state, "session": None}

    def __len__(self) -> int:
        return 0 if self.state is None else len(self.state.layers)

    def __repr__(self) -> str:
        return f"LatteCache({self.length} tokens read, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes held, over the whole batch."""
        return 0 if self.state is None else self.state.nbytes

    def states_for(self, x_BTD: Tensor, layers: int) -> tuple[tuple[State, ...], ...] | None:
        """The layers' states before these tokens; None before any.

        Raises:
            ValueError: it is of another model or batch.
        """
        if self.state is None:
            return None
        if len(self.state.layers) != layers:
            raise ValueError(f"the cache has states of {len(self.state.layers)} layers, expected {layers}")
        self.count_for(x_BTD)
        return self.state.layers

    def count_for(self, x_BTD: Tensor) -> Tensor | None:
        """How many tokens of its document each row has read before these; None before any.

        Raises:
            ValueError: it is of another batch.
        """
        if not self.is_initialized:
            return None
        if self.session is not None:
            count_B = self.session.counts()
        else:
            assert self.state is not None
            count_B = self.state.count_B
        if count_B.shape[0] != x_BTD.shape[0]:
            raise ValueError(f"the cache has {count_B.shape[0]} rows, expected {x_BTD.shape[0]}")
        if self.session is not None or self.state is None:
            return count_B
        if torch.is_grad_enabled() and any(tensor.is_inference() for _, tensor in self.state.tensors()):
            self.state = self.state.fork()  # read in inference mode: as they are, gradients could not use them
        return self.state.count_B

    def advance(self, states: tuple[tuple[State, ...], ...], tokens: Tokens) -> None:
        """Take the layers' states after these tokens."""
        self.replace(ModelState(states, tokens.count_B), tokens.length)

    def replace(self, state: ModelState, tokens: int) -> None:
        """Take the state after so many more tokens."""
        self.state = state
        self.length += tokens

    def read_by(self, session: Session, tokens: int) -> None:
        """A session of this cache has read so many more tokens."""
        self.session, self._state = session, None
        self.length += tokens

    def take_back(self, tokens: int) -> bool:
        """Forget the last tokens that a session has read, of its last call or ``history``; False where it can't."""
        if tokens and (self.session is None or not self.session.take_back(tokens)):
            return False
        if tokens:
            self._state = None
            self.length -= tokens
        return True

    def snapshot(self) -> tuple[ModelState | None, int]:
        """A moment to come back to with :meth:`rollback`: a copy of the states while a decode engine reads."""
        return self.state, self.length

    def rollback(self, snapshot: tuple[ModelState | None, int]) -> None:
        self.state, self.length = snapshot
        self._forget()

    def fork(self) -> LatteCache:
        """A copy that reads on by itself."""
        return LatteCache(None if self.state is None else self.state.fork(), self.length)

    def select(self, index: Tensor) -> LatteCache:
        """Rows ``index`` of the batch, in that order."""
        return LatteCache(None if self.state is None else self.state.select(index), self.length)

    def save(self, path: str | Path) -> None:
        """Write to a safetensors file; :meth:`load` reads it.

        Raises:
            ValueError: nothing was read yet.
        """
        if self.state is None:
            raise ValueError("this cache has read no tokens yet: there is nothing to save")
        self.state.save(path, {LENGTH: str(self.length)})

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> LatteCache:
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: the file holds something else than a model's state, or is damaged.
        """
        loaded, notes = State.load_with_notes(path, device)
        if not isinstance(loaded, ModelState):
            raise ValueError(f"{path} holds a {type(loaded).__name__}, expected a ModelState")
        # Files of earlier versions do not say the length, which is this without padding and documents.
        return cls(loaded, int(notes.get(LENGTH, loaded.count_B.max())))

    # What generate calls, under transformers' names.

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.session is not None or self._state is not None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    @property
    def max_cache_len(self) -> int:
        return -1  # any length

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.is_initialized

    def reset(self) -> None:
        self.state, self.length = None, 0
        self._forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.state is not None:
            self.state = self.state.select(beam_idx)
        self._forget()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.repeat(repeats)
        self._forget()

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def _forget(self) -> None:
        """Drop what was recorded: it is of other rows or of another moment."""
        if self._past is not None:
            self._past.clear()

    @property
    def is_croppable(self) -> bool:
        return False  # unless the past is recorded

    def activate_past_recording(self) -> None:
        """Keep the states before each call from now on, so that :meth:`crop` can take tokens back."""
        if self._past is None:
            self._past = deque(maxlen=RECORDED)

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        return self._past is not None

    def about_to_read(self, again: Reread) -> None:
        """Note the state before a call, if the past is recorded; ``again`` reads the call's first tokens."""
        if self._past is not None:
            self._past.append((self.state, self.length, again))

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last ``-tokens_to_remove`` columns, and forget what was recorded before.

        Tokens of a call that was taken back in part are read again: it costs a call on those that stay.

        Raises:
            ValueError: a positive number, or more tokens than were recorded.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes back {tokens_to_remove} tokens, expected a negative number of them, or 0")
        target, past = self.length + tokens_to_remove, self._past
        if tokens_to_remove and (not past or target < past[0][1]):
            recorded = 0 if not past else self.length - past[0][1]
            raise ValueError(
                f"{-tokens_to_remove} tokens can't be taken out of a recurrent state, {recorded} were recorded: "
                "expected activate_past_recording() before they were read, or snapshot() before and rollback() after"
            )
        again: Reread | None = None
        while past and self.length > target:
            self.state, self.length, again = past.pop()
        self._forget()
        if again is not None and self.length < target:
            self._past = None  # reading again is not recorded
            again(target - self.length)
            self._past = past
