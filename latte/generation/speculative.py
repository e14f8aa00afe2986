"""Speculative decoding: a draft guesses tokens, the model reads all guesses in one call and keeps those that hold.

Greedily a guess holds if it is the model's own choice: the text is that of greedy decoding. With sampling a guess drawn
from q is kept with probability min(1, p/q), and where it is not, a token is drawn from max(0, p - q) scaled to one: the
text then has exactly the distribution p of the model (Leviathan et al., 2023, arXiv 2211.17192). A guess that was not
drawn has q = 1 on itself. States are values: those behind a rejected guess are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from latte.generation.drafts import Draft, Guess
from latte.generation.sampling import GREEDY, Sampling, scores
from latte.generation.steps import Steps, read_each
from latte.models import LatteCache


@dataclass
class Speculation:
    """What was written, and how it came about.

    Attributes:
        tokens: those written.
        guessed: tokens that the draft guessed.
        accepted: how many of them held.
        calls: of the model, the prompt's not counted.
    """

    tokens: list[int] = field(default_factory=list)
    guessed: int = 0
    accepted: int = 0
    calls: int = 0

    @property
    def acceptance(self) -> float:
        """The share of guesses that held; 0 without guesses."""
        return self.accepted / self.guessed if self.guessed else 0.0


@torch.no_grad()
def speculate(
    model: Any,
    ids: Sequence[int],
    draft: Draft,
    max_new_tokens: int = 200,
    sampling: Sampling = GREEDY,
    guesses: int = 4,
    stop_ids: Collection[int] = (),
    chunk: int = 512,
    on_token: Callable[[int], None] | None = None,
) -> Speculation:
    """Continue ``ids`` with the guesses of a draft.

    Args:
        model: a causal language model of latte.
        ids: the prompt's tokens, at least one.
        draft: a :class:`ModelDraft` or :class:`PromptLookup`.
        max_new_tokens: how many to write at most.
        sampling: how tokens are chosen; greedily by default.
        guesses: tokens to guess at a time, at most.
        stop_ids: tokens that end the text; they are not part of it.
        chunk: tokens of the prompt read at once.
        on_token: called with every token as it is written.

    Raises:
        ValueError: no tokens, counts that are too small, or a draft of another vocabulary.
    """
    if not len(ids):
        raise ValueError("the prompt has no tokens, expected at least one")
    if guesses < 1 or max_new_tokens < 0:
        raise ValueError(
            f"guesses is {guesses} and max_new_tokens {max_new_tokens}, expected at least 1 and at least 0"
        )
    _require_vocabulary(model, draft)
    model.eval()
    generator, result = sampling.generator(model.device), Speculation()
    tokens, cache = list(ids), LatteCache()
    for start in range(0, len(ids), chunk):
        part_1T = torch.tensor([list(ids[start : start + chunk])], device=model.device)
        logits_1W = model(part_1T, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
    guess, logits_TW = Guess([]), logits_1W  # before the first token nothing was guessed
    steps: Steps | None = None
    while max_new_tokens:
        kept = _judge(guess, logits_TW, result.tokens, sampling, generator)
        result.accepted += len(kept) - 1
        for token in kept:
            if token in stop_ids:
                return result
            result.tokens.append(token)
            tokens.append(token)
            if on_token is not None:
                on_token(token)
            if len(result.tokens) >= max_new_tokens:
                return result
        if steps is not None:
            steps.keep(len(kept))
        most = min(guesses, max_new_tokens - len(result.tokens) - 1)
        guess = draft.guess(tokens, len(ids), most, sampling) if most > 0 else Guess([])
        result.guessed += len(guess.tokens)
        steps = read_each(model, torch.tensor([[tokens[-1], *guess.tokens]], device=model.device), cache)
        logits_TW = steps.logits_BTW[0]
        result.calls += 1
    return result


def _judge(
    guess: Guess, logits_TW: Tensor, written: list[int], sampling: Sampling, generator: torch.Generator
) -> list[int]:
    """The guesses that hold, and one token more: the model's own behind the last of them."""
    kept: list[int] = []
    for place in range(len(guess.tokens) + 1):
        scores_W = scores(logits_TW[place : place + 1], sampling, [written + kept])[0]
        token = guess.tokens[place] if place < len(guess.tokens) else None
        if sampling.greedy:
            chosen = int(scores_W.argmax())
        else:
            share_W = scores_W.softmax(dim=-1)
            drawn_from = None if guess.share_TW is None or token is None else guess.share_TW[place]
            chosen = accept_or_draw(share_W, token, drawn_from, generator)
        kept.append(chosen)
        if chosen != token:
            break
    return kept


def accept_or_draw(share_W: Tensor, token: int | None, drawn_from_W: Tensor | None, generator: torch.Generator) -> int:
    """``token`` with probability min(1, p/q), else one drawn from max(0, p - q): a draw from p either way.

    share_W: p; token: the guess, drawn from q, None for none; drawn_from_W: q, None: all of it on the guess.
    """
    if token is None:
        return int(torch.multinomial(share_W, 1, generator=generator))
    chance = share_W[token] if drawn_from_W is None else share_W[token] / drawn_from_W[token]
    if torch.rand((), generator=generator, device=share_W.device) < chance:
        return token
    left_W = share_W.clone()
    if drawn_from_W is None:
        left_W[token] = 0
    else:
        left_W = (share_W - drawn_from_W).clamp(min=0)
        left_W[token] = 0  # p < q there; rounding must not say otherwise
    return int(torch.multinomial(left_W, 1, generator=generator))


def _require_vocabulary(model: Any, draft: Draft) -> None:
    other = getattr(draft, "model", None)
    if other is None:
        return
    sizes = [part.get_output_embeddings().weight.shape[0] for part in (other, model)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the draft has {sizes[0]} tokens, expected the model's {sizes[1]}")
