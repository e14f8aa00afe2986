"""Who guesses the next tokens: a smaller model, or the text itself where it repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from latte.generation.sampling import Sampling, scores
from latte.models import LatteCache
from latte.models.cache import ModelState

#: Tokens that a draft can take back at once, most often all of its last guesses.
GUESSES = 16


class Guess(NamedTuple):
    """Tokens, and the distribution that each was drawn from (T, words); None where nothing was drawn."""

    tokens: list[int]
    share_TW: Tensor | None = None


class Draft(Protocol):
    """Guesses how a text goes on."""

    def guess(self, tokens: Sequence[int], prompt: int, most: int, sampling: Sampling) -> Guess:
        """At most ``most`` tokens behind these, of which the first ``prompt`` were given and the others written."""


class PromptLookup:
    """Looks for the last few tokens earlier in the text, and guesses what followed them there. Costs nothing.

    Args:
        longest: tokens to look for at most; fewer where so many are not found, down to one.
    """

    def __init__(self, longest: int = 3) -> None:
        if longest < 1:
            raise ValueError(f"longest is {longest}, expected at least 1")
        self.longest = longest

    def guess(self, tokens: Sequence[int], prompt: int, most: int, sampling: Sampling) -> Guess:
        text_T = torch.tensor(tokens)
        for length in range(min(self.longest, len(tokens) - 1), 0, -1):
            found = (text_T[:-1].unfold(0, length, 1) == text_T[-length:]).all(dim=1).nonzero().flatten()
            if len(found):
                start = int(found[-1]) + length  # the latest place: what was said last is said again soonest
                return Guess(list(tokens[start : start + most]))
        return Guess([])


class ModelDraft:
    """A smaller model with the same vocabulary, which reads the same text and goes back to where it still held.

    Args:
        model: a causal language model of latte.
        chunk: tokens of a prompt read at once.
    """

    def __init__(self, model: Any, chunk: int = 512) -> None:
        self.model, self.chunk = model.eval(), chunk
        self._read: list[int] = []
        self._cache = LatteCache()
        self._states: dict[int, ModelState] = {}  # after so many tokens, where modules read them
        self._generator: torch.Generator | None = None

    @torch.no_grad()
    def guess(self, tokens: Sequence[int], prompt: int, most: int, sampling: Sampling) -> Guess:
        if len(tokens) == prompt or self._generator is None:
            # Not the generator that accepts and rejects: both would use the same draws.
            self._generator = torch.Generator(self.model.device).manual_seed(sampling.seed ^ 0x5DEECE66D)
        guessed, shares, written = list[int](), list[Tensor](), list(tokens[prompt:])
        logits_1W = self._catch_up(tokens)
        while True:
            scores_1W = scores(logits_1W, sampling, [written + guessed])
            if sampling.greedy:
                token = int(scores_1W.argmax())
            else:
                shares.append(scores_1W.softmax(dim=-1))
                token = int(torch.multinomial(shares[-1], 1, generator=self._generator))
            guessed.append(token)
            if len(guessed) == most:
                return Guess(guessed, torch.cat(shares) if shares else None)
            logits_1W = self._forward([token])

    def _catch_up(self, tokens: Sequence[int]) -> Tensor:
        """Read what is new behind the longest state that still holds; logits behind the last token."""
        same = 0
        for mine, theirs in zip(self._read, tokens, strict=False):
            if mine != theirs:
                break
            same += 1
        held = min(same, len(tokens) - 1)
        if not self._cache.take_back(len(self._read) - held):
            held = max((count for count in self._states if count <= held), default=0)
            self._cache = LatteCache(self._states.get(held), held)
        self._cache.history = GUESSES
        self._states = {count: state for count, state in self._states.items() if count <= held}
        self._read = list(tokens[:held])
        for start in range(held, len(tokens), self.chunk):
            logits_1W = self._forward(list(tokens[start : start + self.chunk]))
        return logits_1W

    def _forward(self, ids: list[int]) -> Tensor:
        ids_1T = torch.tensor([ids], device=self.model.device)
        output = self.model(ids_1T, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._read += ids
        if self._cache.session is None and self._cache.state is not None:
            self._states[len(self._read)] = self._cache.state
        return output.logits[:, -1]
