"""What is known of the tokens of a batch: which are padding, where documents begin, how many came before.

Built once, where a model (or a mixer, or an op) is entered, and handed down. Whatever follows from it (places,
segments, the permutation that takes padding out) is computed when it is first asked for and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.modes import values_hidden
from latte.shapes import given

Value = TypeVar("Value")


def derived(make: Callable[[Any], Value]) -> Value:
    """A property that is computed once. (Not functools.cached_property: its lock breaks compiled graphs.)"""
    name = make.__name__

    def get(tokens: Any) -> Value:
        if name not in tokens._derived:
            tokens._derived[name] = make(tokens)
        return tokens._derived[name]

    return cast(Value, property(get, doc=make.__doc__))


class Tokens:
    """The tokens of a batch of B rows of T columns.

    Attributes:
        mask: (B, T), True at real tokens, anywhere in the row; None where there is no padding.
        reset: (B, T), True at the first token of each document, anywhere in the row; None where no document begins
            behind another token. Without a carried state the first token of a row begins a document by itself.
        continues: the rows continue documents that a state has read a part of.

    Use :meth:`of` to make one from masks that a user gave: it checks and simplifies them.
    """

    def __init__(
        self,
        batch: int,
        length: int,
        device: torch.device,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        start_B: Tensor | None = None,
        continues: bool | None = None,
    ) -> None:
        self.batch, self.length, self.device = batch, length, device
        self.mask, self.reset, self._start_B = mask, reset, start_B
        self.continues = start_B is not None if continues is None else continues
        self._derived: dict[Hashable, Any] = {}

    @classmethod
    def of(
        cls,
        like_BT: Tensor,
        *,
        mask: Tensor | None = None,
        reset: Tensor | None = None,
        start: Tensor | None = None,
        continues: bool | None = None,
        where: str = "tokens",
    ) -> Tokens:
        """The tokens of ``like`` (B, T, ...); ``start`` (B,) counts the tokens of its document that a row continues.

        A mask without padding is dropped, and so is a ``reset`` that only marks first tokens of rows that start afresh:
        every layer then takes its shortest path. Where numbers can't be looked at (compiling, vmap), both are kept.

        Raises:
            ValueError: flags that are not boolean, or of another shape or device.
        """
        B, T = like_BT.shape[:2]
        for name, flags in (("mask", mask), ("reset", reset)):
            if flags is not None:
                _check_flags(where, name, flags, like_BT)
        if start is not None and (start.shape != (B,) or start.is_floating_point() or start.dtype == torch.bool):
            raise ValueError(
                f"{where}: start is {start.dtype} of shape {given(start)}, expected integers of shape ({B},)"
            )
        tokens = cls(B, T, like_BT.device, mask, reset, start, continues)
        return tokens if values_hidden(like_BT) else tokens.simplified()

    @classmethod
    def default(cls, like_BT: Tensor, state: object | None) -> Tokens:
        """For a call without tokens: no padding, no boundary; with a state, behind it, at a place that nobody said."""
        B, T = like_BT.shape[:2]
        return cls(B, T, like_BT.device, continues=state is not None)

    def simplified(self) -> Tokens:
        """The same facts with fewer tensors."""
        mask, reset = self.mask, self.reset
        if mask is not None and bool(mask.all()):
            mask = None
        if reset is not None and not self.continues:
            # Where nothing was read before it, the first token of a document begins one anyway.
            before_BT = self._arange_BT() if mask is None else mask.long().cumsum(1) - mask.long()
            reset = reset & (before_BT > 0)
        if reset is not None and not bool(reset.any()):
            reset = None
        if mask is self.mask and reset is self.reset:
            return self
        return Tokens(self.batch, self.length, self.device, mask, reset, self._start_B, self.continues)

    # What follows.

    @property
    def plain(self) -> bool:
        """No padding, and no document begins behind another."""
        return self.mask is None and self.reset is None

    @property
    def from_start(self) -> bool:
        """Every row is one document from its first token on: token t stands at place t."""
        return self.plain and not self.continues

    @property
    def start_B(self) -> Tensor:
        """How many tokens of the document that each row continues were read before.

        Raises:
            ValueError: the rows continue a state, but nobody said how many tokens it has read.
        """
        if self._start_B is None:
            if self.continues:
                raise ValueError(
                    "a state was given without the number of tokens it has read, "
                    "expected tokens=Tokens.of(x, start=...), with the count_B of the tokens before"
                )
            return torch.zeros(self.batch, dtype=torch.long, device=self.device)
        return self._start_B

    @derived
    def in_row_BT(self) -> Tensor:
        """How many tokens of its document stand in this row up to each column, this one included."""
        if self.plain:
            return torch.arange(1, self.length + 1, device=self.device).expand(self.batch, -1)
        real_BT = self.real_BT.long()
        read_BT = real_BT.cumsum(1)
        if self.reset is None:
            return read_BT
        # Counts never fall, so the latest document's start is the largest one so far.
        return read_BT - torch.where(self.reset, read_BT - real_BT, 0).cummax(1).values

    @derived
    def count_BT(self) -> Tensor:
        """How many tokens of its document each row has read up to each column, those before this row included."""
        if not self.continues:
            return self.in_row_BT
        return self.in_row_BT + torch.where(self.segment_BT == 0, self.start_B[:, None], 0)

    @derived
    def place_BT(self) -> Tensor:
        """Place of each real token in its document, from 0, as if the padding were removed."""
        return self.count_BT - 1

    @derived
    def count_B(self) -> Tensor:
        """How many tokens of its last document each row has read in the end: the ``start`` of what follows."""
        return self.start_B + self.length if self.plain else self.count_BT[:, -1]

    @derived
    def segment_BT(self) -> Tensor:
        """Documents of each row by number: 0 before the first reset, where a carried state belongs, then 1, 2, ..."""
        if self.reset is None:
            return torch.zeros(self.batch, self.length, dtype=torch.long, device=self.device)
        return self.reset.long().cumsum(1)

    @derived
    def real_BT(self) -> Tensor:
        """The mask, all True without padding."""
        if self.mask is not None:
            return self.mask
        return torch.ones(self.batch, self.length, dtype=torch.bool, device=self.device)

    @derived
    def read_B(self) -> Tensor:
        """How many real tokens each row has."""
        if self.mask is None:
            return torch.full((self.batch,), self.length, dtype=torch.long, device=self.device)
        return self.mask.long().sum(1)

    @derived
    def compact(self) -> Compact | None:
        """The permutation that moves padding behind all real tokens; None without padding.

        Mechanisms that look a number of *tokens* back (windows, convolutions) need it to be exact under any padding;
        recurrences don't, because padding is an identity step for them.
        """
        if self.mask is None:
            return None
        order_BT = torch.argsort((~self.mask).to(torch.uint8), dim=1, stable=True)
        return Compact(order_BT, torch.argsort(order_BT, dim=1))

    @derived
    def longest(self) -> int:
        """Tokens of the longest document in these rows, at least 1; the whole row where numbers can't be looked at."""
        if self.plain or self._hidden:
            return self.length
        return max(1, int(self.in_row_BT.max()))

    @property
    def _hidden(self) -> bool:
        """Whether the numbers of the flags can't be looked at."""
        flags = self.reset if self.mask is None else self.mask
        return flags is not None and values_hidden(flags)

    @derived
    def documents(self) -> Documents:
        """Every document as a row of its own. Where numbers can't be looked at, with room for all cases: quadratic."""
        B, T, longest = self.batch, self.length, self.longest
        document_BT, rows = torch.arange(B, device=self.device)[:, None].expand(B, T), B
        if self.reset is not None:
            document_BT, rows = document_BT * (T + 1) + self.segment_BT, B * (T + 1)
            if not self._hidden:
                numbers_R, document_BT = document_BT.unique(return_inverse=True)
                rows = numbers_R.numel()
        room = rows * longest
        # Padding goes to one place behind all rows.
        home_BT = torch.where(self.real_BT, document_BT * longest + self.in_row_BT - 1, room)
        index = torch.arange(B * T, device=self.device)
        source = torch.full((room + 1,), -1, device=self.device).scatter(0, home_BT.flatten(), index)[:room]
        return Documents(source.clamp(min=0).view(rows, longest), (source >= 0).view(rows, longest), home_BT)

    @derived
    def reversed(self) -> Tokens:
        """The tokens read from right to left: a document then begins at its last token."""
        mask = None if self.mask is None else self.mask.flip(1)
        reset = None if self.reset is None else F.pad(self.reset[:, 1:], (0, 1)).flip(1)
        return Tokens(self.batch, self.length, self.device, mask, reset)

    def part(self, start: int, stop: int) -> Tokens:
        """Columns ``start`` to ``stop``, as tokens that continue what stands before them."""
        mask, reset = (None if flags is None else flags[:, start:stop] for flags in (self.mask, self.reset))
        if start == 0:
            count_B, continues = self._start_B, self.continues
        elif self.continues and self._start_B is None:
            count_B, continues = None, True
        else:
            count_B, continues = self.count_BT[:, start - 1], True
        return Tokens(self.batch, min(stop, self.length) - start, self.device, mask, reset, count_B, continues)

    def shared(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """What ``make`` gives, made once for all layers that ask under the same key."""
        if torch.compiler.is_compiling():
            return make()
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    def parts(self, size: int) -> list[Tokens]:
        """Pieces of at most ``size`` columns, one after another; cut once for all layers."""
        starts = range(0, self.length, size)
        return self.shared(("parts", size), lambda: [self.part(start, start + size) for start in starts])

    def seen_BTS(self, causal: bool) -> Tensor:
        """Which tokens each token may look at: real ones of its document, up to itself if ``causal``. Quadratic."""
        seen_BTS = (self.segment_BT[:, :, None] == self.segment_BT[:, None, :]) & self.real_BT[:, None, :]
        return seen_BTS.tril() if causal else seen_BTS

    def over_documents(self, function: Callable[..., Tensor], *tensors_BT: Tensor) -> Tensor:
        """``function(*rows_RL, real_RL)`` of the documents as rows, as (B, T, ...), 0 at padding.

        For mechanisms that look at a document as a whole. Rows of one document each without padding are taken as they
        are, with all of ``real`` True.
        """
        if self.plain:
            return function(*tensors_BT, self.real_BT)
        documents = self.documents
        return documents.scatter(function(*(documents.gather(x) for x in tensors_BT), documents.real_RL))

    def zero_padding(self, y_BT: Tensor) -> Tensor:
        """``y`` with exact zeros at padding, so that a pad's output says nothing and carries no gradient."""
        return y_BT if self.mask is None else torch.where(self._aligned(self.mask, y_BT), y_BT, torch.zeros_like(y_BT))

    def fill_padding(self, x_BT: Tensor, value: float) -> Tensor:
        """``x`` with ``value`` at padding."""
        return x_BT if self.mask is None else torch.where(self._aligned(self.mask, x_BT), x_BT, value)

    def check_fits(self, where: str, x_BT: Tensor) -> None:
        """Raise ValueError unless these are the tokens of ``x``."""
        if (self.batch, self.length) != tuple(x_BT.shape[:2]):
            expected = f"({x_BT.shape[0]}, {x_BT.shape[1]})"
            raise ValueError(f"{where}: tokens are of shape ({self.batch}, {self.length}), expected {expected}")
        if self.device != x_BT.device:
            raise ValueError(f"{where}: tokens are on {self.device}, but the input is on {x_BT.device}")

    def __repr__(self) -> str:
        facts = [f"{self.batch} x {self.length}"]
        facts += [
            name for name, there in (("padded", self.mask is not None), ("packed", self.reset is not None)) if there
        ]
        return f"Tokens({', '.join([*facts, *(['continued'] if self.continues else [])])})"

    def _arange_BT(self) -> Tensor:
        return torch.arange(self.length, device=self.device).expand(self.batch, -1)

    @staticmethod
    def _aligned(flags_BT: Tensor, x_BT: Tensor) -> Tensor:
        return flags_BT.reshape(*flags_BT.shape, *([1] * (x_BT.dim() - 2)))


class Compact(NamedTuple):
    """Rows with their real tokens moved to the front, in order; what follows them is padding."""

    order_BT: Tensor
    inverse_BT: Tensor

    def gather(self, x_BT: Tensor) -> Tensor:
        return take_tokens(x_BT, self.order_BT)

    def scatter(self, x_BT: Tensor) -> Tensor:
        return take_tokens(x_BT, self.inverse_BT)


class Documents(NamedTuple):
    """Documents as rows: token l of a document stands in column l of its row, and what follows its last is padding."""

    source_RL: Tensor
    real_RL: Tensor
    home_BT: Tensor

    def gather(self, x_BT: Tensor) -> Tensor:
        """(B, T, ...) to (R, L, ...), with zeros behind the documents."""
        rows_RL = take_tokens(x_BT.flatten(0, 1)[None], self.source_RL.flatten()[None])[0].unflatten(
            0, self.source_RL.shape
        )
        return torch.where(self.real_RL.reshape(*self.real_RL.shape, *([1] * (x_BT.dim() - 2))), rows_RL, 0.0)

    def scatter(self, y_RL: Tensor) -> Tensor:
        """(R, L, ...) back to (B, T, ...), with zeros at padding."""
        flat = torch.cat([y_RL.flatten(0, 1), torch.zeros_like(y_RL[:1, 0])])
        return take_tokens(flat[None], self.home_BT.flatten()[None])[0].unflatten(0, self.home_BT.shape)


def require_tokens(where: str, tokens: Tokens | None, like_BT: Tensor, state: object | None = None) -> Tokens:
    """``tokens`` if they are those of ``like``; for None, tokens without padding and boundaries, behind ``state``.

    Raises:
        ValueError: tokens of another shape or device.
    """
    if tokens is None:
        return Tokens.default(like_BT, state)
    tokens.check_fits(where, like_BT)
    return tokens


def take_tokens(x_BT: Tensor, index_BN: Tensor) -> Tensor:
    """Tokens ``index`` of each row: (B, S, ...) and (B, N) give (B, N, ...)."""
    index = index_BN.reshape(*index_BN.shape, *([1] * (x_BT.dim() - 2)))
    return torch.gather(x_BT, 1, index.expand(-1, -1, *x_BT.shape[2:]))


def _check_flags(where: str, name: str, flags: Tensor, like_BT: Tensor) -> None:
    if flags.dtype != torch.bool:
        raise ValueError(f"{where}: {name} has dtype {flags.dtype}, expected torch.bool")
    if flags.device != like_BT.device:
        raise ValueError(f"{where}: {name} is on {flags.device}, but the input is on {like_BT.device}")
    B, T = like_BT.shape[:2]
    if flags.dim() != 2:
        raise ValueError(f"{where}: {name} has shape {given(flags)}, expected 2 axes (B, T)")
    if flags.shape != (B, T):
        raise ValueError(f"{where}: {name} has shape {given(flags)}, expected (B={B}, T={T})")
