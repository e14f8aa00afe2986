"""Continuous batching: requests of different lengths in one running batch, which rows join and leave at any token.

A request's past is a row of the model's state, of one size whatever was read: joining is appending a row, leaving is
dropping one. Prompts are read in pieces of their own beside the tokens of the others, so that a long prompt does not
hold them up. Decoding reads the weights once for all rows.

What a request gets does not depend on the others: its prompt is read by itself, its tokens come from its own generator,
and the native kernels compute each row alike to the last bit, whatever the batch. Where a model goes through torch's
modules instead (a GPU, or layers that the decode engine does not know), products of a batch round otherwise than those
of a row, and a near tie between two tokens can fall the other way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from latte.generation.sampling import GREEDY, Sampling, choose
from latte.models import LatteCache
from latte.models.cache import ModelState
from latte.state import State


@dataclass(frozen=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
        ids: the prompt's tokens, at least one.
        max_new_tokens: how many to write at most.
        sampling: how each is chosen; greedily by default.
        stop_ids: tokens that end the text; they are not part of it.
        stop: called with all tokens written so far after each; True ends the text behind that token.
        on_token: called with every token as it is written.
    """

    ids: Sequence[int]
    max_new_tokens: int = 200
    sampling: Sampling = GREEDY
    stop_ids: Collection[int] = ()
    stop: Callable[[list[int]], bool] | None = None
    on_token: Callable[[int], None] | None = None


@dataclass(eq=False)
class Ticket:
    """A request in a batch: the tokens written so far, and why the last one was the last (None: it goes on)."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    ended: Literal["length", "stop", "cancelled", "failed"] | None = None

    @property
    def done(self) -> bool:
        return self.ended is not None


@dataclass(eq=False)
class _Row:
    """A request that is being read or written: where it stands."""

    ticket: Ticket
    generator: torch.Generator
    cache: LatteCache = field(default_factory=LatteCache)  # only while the prompt is read
    read: int = 0  # tokens of the prompt
    waiting: int = -1  # the last token written, which the model has not read yet


class Batch:
    """Requests that a model answers together.

    :meth:`submit` may be called at any time, also while another thread is in :meth:`run`; :meth:`step` writes one token
    of every running request.

    Args:
        model: a causal language model whose state has one size.
        max_rows: requests that are written at a time; the others wait.
        chunk: tokens of prompts that are read between two tokens of the others.

    Raises:
        ValueError: a model whose state grows with the text, or counts below 1.
    """

    def __init__(self, model: Any, max_rows: int = 32, chunk: int = 512) -> None:
        if max_rows < 1 or chunk < 1:
            raise ValueError(f"max_rows is {max_rows} and chunk {chunk}, expected at least 1 each")
        require_rows(model)
        self.model, self.max_rows, self.chunk = model.eval(), max_rows, chunk
        self.device = model.device  # kept: looking for it takes as long as a small layer
        self._waiting: deque[_Row] = deque()
        self._reading: deque[_Row] = deque()
        self._running: list[_Row] = []
        self._cache = LatteCache()
        self._lock = threading.Lock()

    @property
    def idle(self) -> bool:
        """Whether every request is done."""
        return not (self._waiting or self._reading or self._running)

    def submit(self, request: Request) -> Ticket:
        """Queue a request.

        Raises:
            ValueError: no tokens, tokens that the model does not know, or more than its learned positions.
        """
        self._check(request)
        ticket = Ticket(request)
        if request.max_new_tokens == 0:
            ticket.ended = "length"
        else:
            self._waiting.append(_Row(ticket, request.sampling.generator(self.device)))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request now; what it has written stays in the ticket."""
        if not ticket.done:
            ticket.ended = "cancelled"  # the next step lets its row go

    def run(self, requests: Iterable[Request] = ()) -> list[Ticket]:
        """Submit requests and work until every request is done, earlier ones too; returns the tickets of these."""
        tickets = [self.submit(request) for request in requests]
        while not self.idle:
            self.step()
        return tickets

    @torch.no_grad()
    def step(self) -> None:
        """Read a piece of the prompts that wait, and write one token of every running request.

        Raises:
            Exception: a callback's own; its request has failed then, all others have their tokens.
        """
        with self._lock:
            failures: list[Exception] = []
            joined = self._read_prompts(failures)
            if self._running:
                self._write(failures)
            self._settle(joined)
        if failures:
            raise failures[0]

    def _read_prompts(self, failures: list[Exception]) -> list[_Row]:
        """Read about ``chunk`` tokens of prompts in order; the rows whose prompt is read now, with a first token."""
        left, joined = self.chunk, list[_Row]()
        while left > 0:
            if not self._reading:
                if not self._waiting or len(self._running) + len(joined) >= self.max_rows:
                    break
                self._reading.append(self._waiting.popleft())
            row = self._reading[0]
            if row.ticket.done:
                self._reading.popleft()
                continue
            # Pieces of one size from the prompt's start on: where they are cut must not depend on other requests.
            ids = row.ticket.request.ids[row.read : row.read + self.chunk]
            if len(ids) > left and joined:
                break
            logits_1W = self._forward([list(ids)], row.cache)
            row.read, left = row.read + len(ids), left - len(ids)
            if row.read == len(row.ticket.request.ids):
                self._reading.popleft()
                self._choose([row], logits_1W, failures)
                joined.append(row)
        return joined

    def _write(self, failures: list[Exception]) -> None:
        logits_BW = self._forward([[row.waiting] for row in self._running], self._cache)
        self._choose(self._running, logits_BW, failures)

    def _choose(self, rows: Sequence[_Row], logits_BW: Tensor, failures: list[Exception]) -> None:
        """The next token of these rows, and which of them end with it."""
        tickets = [row.ticket for row in rows]
        samplings = [ticket.request.sampling for ticket in tickets]
        tokens = choose(logits_BW, samplings, [ticket.tokens for ticket in tickets], [row.generator for row in rows])
        for row, ticket, token in zip(rows, tickets, tokens, strict=True):
            if ticket.done:
                continue  # cancelled meanwhile
            request, row.waiting = ticket.request, token
            if token in request.stop_ids:
                ticket.ended = "stop"
                continue
            ticket.tokens.append(token)
            try:
                if request.on_token is not None:
                    request.on_token(token)
                if request.stop is not None and request.stop(ticket.tokens):
                    ticket.ended = "stop"
            except Exception as error:
                ticket.ended = "failed"
                failures.append(error)
            if ticket.ended is None and len(ticket.tokens) >= request.max_new_tokens:
                ticket.ended = "length"

    def _settle(self, joined: Sequence[_Row]) -> None:
        """Drop the rows of requests that are done, and append those that have joined."""
        staying = [index for index, row in enumerate(self._running) if not row.ticket.done]
        joined = [row for row in joined if not row.ticket.done]
        if len(staying) == len(self._running) and not joined:
            return
        states: list[ModelState] = []
        if staying:
            assert self._cache.state is not None
            kept = torch.tensor(staying, device=self.device)
            states.append(self._cache.state if len(staying) == len(self._running) else self._cache.state.select(kept))
        for row in joined:
            assert row.cache.state is not None
            states.append(row.cache.state)
            row.cache = LatteCache()
        self._running = [self._running[index] for index in staying] + list(joined)
        # Rows have read texts of different lengths, which their states count; the cache's length is for generate.
        self._cache = LatteCache(State.concat(states) if states else None)

    def _forward(self, ids: list[list[int]], cache: LatteCache) -> Tensor:
        """Read tokens; logits behind the last of each row."""
        ids_BT = torch.tensor(ids, device=self.device)
        output = self.model(input_ids=ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1]

    def _check(self, request: Request) -> None:
        if not len(request.ids):
            raise ValueError("the request has no tokens, expected at least one")
        if request.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {request.max_new_tokens}, expected at least 0")
        known = self.model.get_input_embeddings().num_embeddings
        strange = next((token for token in request.ids if not 0 <= token < known), None)
        if strange is not None:
            raise ValueError(f"the request has the token {strange}, expected tokens from 0 to {known - 1}")
        places = getattr(self.model.body, "embed_positions", None)
        longest = len(request.ids) + request.max_new_tokens - 1  # the last token written is not read
        if places is not None and longest > places.num_embeddings:
            raise ValueError(
                f"the request has {len(request.ids)} tokens and asks for {request.max_new_tokens} more, but the "
                f"model's learned positions end at {places.num_embeddings}"
            )


def require_rows(model: Any) -> None:
    """Check that rows that have read different lengths can stand in one batch of this model.

    Raises:
        ValueError: they can't; the sentence says why.
    """
    layers = getattr(getattr(model, "body", None), "layers", None)
    if layers is None:
        raise ValueError(f"a {type(model).__name__} keeps no state as rows, expected a model of latte")
    for mixer in _mixers(model):
        if mixer.growth != "constant":
            raise ValueError(
                f"the state of mixer {mixer.name!r} grows with the text ({mixer.growth}), "
                "expected one size, so that rows of different lengths fit in one batch"
            )


def _mixers(model: Any) -> list[Any]:
    from latte.mixers import Mixer

    return [module for module in model.modules() if isinstance(module, Mixer)]
