"""Log-probabilities of continuations behind contexts; what several of them share is read once.

Reading goes down the tree of common beginnings: solved examples that all questions have, the question that its answers
have, the answers. A cache is forked where the tree branches. The scores are those of reading every row whole, at
the cost of the tree's edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from latte.eval.caches import forkable, select

#: Fewest tokens that sharing has to save: each branch of the tree costs a call of the model.
LEAST = 8
#: Most tokens of a call, padding included.
TOKENS = 2048


@dataclass(frozen=True)
class Score:
    """Of one continuation: its log-probability, and whether each of its tokens was the likeliest."""

    log_probability: float
    greedy: bool


@dataclass
class _Request:
    tokens: list[int]
    first: int  # of the continuation's tokens
    log_probability: float = 0.0
    greedy: bool = True

    @property
    def read(self) -> int:
        """Tokens to read: the last one is only predicted."""
        return len(self.tokens) - 1


@dataclass
class _Group:
    """Requests whose first ``end`` tokens are the same, behind one row of a cache."""

    row: int
    requests: list[_Request]
    end: int


class ContinuationScorer:
    """Scores continuations with a causal language model.

    Args:
        model: a causal language model in eval mode, ours or one of transformers.
        rows: most rows of a call.
        share: read what continuations share once; False reads every row whole.
    """

    def __init__(self, model: Any, rows: int = 32, share: bool = True) -> None:
        self.model, self.rows = model, rows
        self.tokens_read = 0
        self._least: float = LEAST if share and self._forks() else float("inf")

    @torch.no_grad()
    def score(
        self,
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        longest: int | None = None,
        on_score: Callable[[int], object] = lambda count: None,
    ) -> list[Score]:
        """The score of each pair of a context and a continuation, both of at least one token.

        Args:
            longest: tokens that the model reads at most; longer contexts lose their first ones.
            on_score: called with how many more continuations are scored.

        Raises:
            ValueError: an empty context or continuation, or a continuation longer than ``longest``.
        """
        requests = [_request(context, continuation, longest) for context, continuation in pairs]
        if requests:
            self._read(None, [sorted(requests, key=lambda request: request.tokens)], 0, on_score)
        return [Score(request.log_probability, request.greedy) for request in requests]

    def _read(self, cache: Any, rows: list[list[_Request]], start: int, on_score: Callable[[int], object]) -> None:
        """Score ``rows``, the requests behind each row of a cache that has read their first ``start`` tokens."""
        groups = [
            _Group(row, members, end)
            for row, requests in enumerate(rows)
            for members, end in grouped(requests, start, self._least)
        ]
        # Nothing comes after a single request, so that its row may be padded. Rows of one call that are read further
        # must have read as many tokens: groups are cut at the shortest, and what is left of the others comes later.
        for batch in self._batches([group for group in groups if len(group.requests) == 1], start):
            self._step(cache, batch, start, batch[-1].end)
            on_score(len(batch))
        for batch in self._batches([group for group in groups if len(group.requests) > 1], start):
            end = batch[0].end
            after = self._step(cache, batch, start, end)
            left = [[request for request in group.requests if request.read > end] for group in batch]
            on_score(sum(len(group.requests) for group in batch) - sum(map(len, left)))
            if any(left):
                self._read(after, left, end, on_score)

    def _batches(self, groups: list[_Group], start: int) -> Iterator[list[_Group]]:
        """Groups of nearly one length, as many as a call takes."""
        batch: list[_Group] = []
        for group in sorted(groups, key=lambda group: group.end):
            if len(batch) == self.rows or (batch and (len(batch) + 1) * (group.end - start) > TOKENS):
                yield batch
                batch = []
            batch.append(group)
        if batch:
            yield batch

    def _step(self, cache: Any, batch: list[_Group], start: int, end: int) -> Any:
        """Read tokens ``start`` to ``end`` of each group, score what they predict, and return the cache behind them."""
        ids_BT = torch.zeros(len(batch), end - start, dtype=torch.long)
        for row, group in enumerate(batch):
            part = group.requests[0].tokens[start : min(end, group.end)]
            ids_BT[row, : len(part)] = torch.tensor(part)
            self.tokens_read += len(part)
        # Logits are computed only from the first place that predicts a token of a continuation; what comes before it is
        # read in pieces.
        first = min(max(request.first, start + 1) for group in batch for request in group.requests)
        kept = max(1, end + 1 - first)
        ids_BT = ids_BT.to(self.model.device)
        cache = select(cache, torch.tensor([group.row for group in batch], device=self.model.device))
        lead, last = ids_BT.split([ids_BT.shape[1] - kept, kept], dim=1)
        for piece in lead.split(max(1, TOKENS // len(batch)), dim=1) if lead.shape[1] else ():
            cache = self._call(piece, cache, 1).past_key_values
        output = self._call(last, cache, kept)
        logs_BKW = output.logits[:, -kept:].float().log_softmax(-1)
        best_BK = logs_BKW.argmax(-1)
        for row, group in enumerate(batch):
            for request in group.requests:
                _add(request, logs_BKW[row], best_BK[row], start, end)
        return output.past_key_values

    def _call(self, ids_BT: Tensor, cache: Any, kept: int) -> Any:
        return self.model(input_ids=ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=kept)

    @torch.no_grad()
    def _forks(self) -> bool:
        """Whether the model's cache can be forked; a model of another kind is read whole for every request."""
        ids_BT = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        return forkable(self.model(input_ids=ids_BT, use_cache=True).past_key_values)


def grouped(requests: list[_Request], start: int, least: float) -> list[tuple[list[_Request], int]]:
    """Requests in the order of their tokens as groups that read the same next, each with the end of what is the same.

    A request joins the group before it where that saves at least ``least`` tokens: it need not read what it shares. The
    others are grouped again behind that; what they share further is read once if it is long enough, else by each.
    """
    groups: list[tuple[list[_Request], int]] = []
    for request in requests:
        if groups:
            members, end = groups[-1]
            shared = min(end, request.read, _common(members[-1].tokens, request.tokens))
            alone = end - shared if end - shared < least else 0
            if shared - start - (len(members) - 1) * alone >= least:
                groups[-1] = ([*members, request], shared)
                continue
        groups.append(([request], request.read))
    return groups


def _request(context: Sequence[int], continuation: Sequence[int], longest: int | None) -> _Request:
    if not context or not continuation:
        empty = "context" if not context else "continuation"
        raise ValueError(f"a {empty} has no tokens, expected at least one")
    if longest is not None and len(continuation) > longest:
        raise ValueError(f"a continuation has {len(continuation)} tokens, expected at most {longest}")
    tokens = [*context, *continuation]
    tokens = tokens if longest is None else tokens[-(longest + 1) :]
    return _Request(tokens, len(tokens) - len(continuation))


def _add(request: _Request, logs_KW: Tensor, best_K: Tensor, start: int, end: int) -> None:
    """Add to a request's score what the tokens from ``start`` to ``end``, the last K of them, predict of it."""
    first, last = max(request.first, start + 1), min(end, request.read)
    if first > last:
        return
    wanted = torch.tensor(request.tokens[first : last + 1], device=logs_KW.device)
    places = slice(first - 1 - end + len(best_K), last - end + len(best_K))
    request.log_probability += float(logs_KW[places].gather(-1, wanted[:, None]).sum())
    request.greedy &= bool((best_K[places] == wanted).all())


def _common(a: list[int], b: list[int]) -> int:
    """How many first tokens are the same."""
    return next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
