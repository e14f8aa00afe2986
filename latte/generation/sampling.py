"""How the next token is chosen: greedily, or by sampling from a distribution that temperature and cuts have changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

REMEMBERED = 1024  # written tokens that the repetition penalty applies to
PART = 64  # words whose shares are summed before one of them is drawn
IMPROBABLE = "probabilities of the next token are NaN or 0, expected finite logits"


@dataclass(frozen=True)
class Sampling:
    """Settings of one request; the default is greedy.

    Attributes:
        temperature: below 1 prefers probable tokens; 0 takes the most probable one.
        top_k: sample from this many most probable tokens; 0: from all.
        top_p: sample from the most probable tokens that together have this probability.
        min_p: leave out tokens less probable than this fraction of the most probable one's probability.
        repetition_penalty: above 1 makes tokens that were already written less probable.
        seed: of the request's own generator.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "at least 0 and at most 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "more than 0"),
            ("seed", self.seed >= 0, "at least 0"),
        ):
            if not good:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {expected}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def plain(self) -> bool:
        """Whether nothing but the temperature changes the probabilities."""
        return not self.top_k and self.top_p == 1 and not self.min_p and self.repetition_penalty == 1

    @property
    def kind(self) -> tuple[float, ...]:
        """Rows of the same kind are processed together."""
        return (self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)

    def processors(self) -> LogitsProcessorList:
        """transformers' own processors for these settings, in the order of ``generate``."""
        chosen: list[Any] = []
        if self.repetition_penalty != 1:
            chosen.append(RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty)))
        if self.temperature > 0:
            if self.temperature != 1:
                chosen.append(TemperatureLogitsWarper(float(self.temperature)))
            if self.top_k > 0:
                chosen.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1:
                chosen.append(TopPLogitsWarper(self.top_p))
            if self.min_p > 0:
                chosen.append(MinPLogitsWarper(self.min_p))
        return LogitsProcessorList(chosen)

    def generator(self, device: torch.device | str) -> torch.Generator:
        return torch.Generator(device=device).manual_seed(self.seed)


#: Always the most probable token.
GREEDY = Sampling()


def scores(logits_NW: Tensor, sampling: Sampling, written: Sequence[Sequence[int]]) -> Tensor:
    """Logits of rows of one kind after all processors; ``written`` holds the tokens that each row has written."""
    processors, scores_NW = sampling.processors(), logits_NW.float()
    if not processors:
        return scores_NW
    recent = [list(tokens[-REMEMBERED:]) for tokens in written]
    if sampling.repetition_penalty != 1:
        # Rows differ in length. A token that is listed twice is penalised once: rows are filled with their last token.
        # One that has written nothing is left alone.
        begun = [row for row, tokens in enumerate(recent) if tokens]
        if begun:
            longest = max(len(recent[row]) for row in begun)
            filled = [recent[row] + recent[row][-1:] * (longest - len(recent[row])) for row in begun]
            context = torch.tensor(filled, device=logits_NW.device)
            index = torch.tensor(begun, device=logits_NW.device)
            penalised = processors[0](context, scores_NW[index].clone())
            scores_NW = scores_NW.index_copy(0, index, penalised)
        processors = LogitsProcessorList(processors[1:])
    unread = torch.empty(len(written), 0, dtype=torch.long, device=logits_NW.device)  # the others look at scores alone
    return processors(unread, scores_NW)  # type: ignore[arg-type]


def choose(
    logits_BW: Tensor,
    samplings: Sequence[Sampling],
    written: Sequence[Sequence[int]],
    generators: Sequence[torch.Generator],
) -> list[int]:
    """The next token of every row, each by its own settings and from its own generator: as if it were alone."""
    tokens = [0] * len(samplings)
    kinds: dict[tuple[float, ...], list[int]] = {}
    for row, sampling in enumerate(samplings):
        kinds.setdefault(sampling.kind, []).append(row)
    for rows in kinds.values():
        sampling = samplings[rows[0]]
        if sampling.plain and logits_BW.device.type == "cpu":
            for row in rows:
                tokens[row] = _choose_alone(logits_BW[row], sampling, generators[row])
            continue
        mine_NW = logits_BW if len(rows) == len(samplings) else logits_BW[torch.tensor(rows, device=logits_BW.device)]
        scores_NW = scores(mine_NW, sampling, [written[row] for row in rows])
        if sampling.greedy:
            for row, token in zip(rows, scores_NW.argmax(dim=-1).tolist(), strict=True):
                tokens[row] = token
        else:
            for row, share_W in zip(rows, scores_NW.softmax(dim=-1), strict=True):
                tokens[row] = draw(share_W, generators[row])
    return tokens


def _choose_alone(logits_W: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token of a row on the CPU whose probabilities are softmax(logits / temperature).

    By numpy, whose operations stay on one thread: waking torch's others takes longer than a vocabulary's exponentials.
    """
    logits = logits_W.detach().float().numpy()
    top = int(logits.argmax())
    if sampling.greedy:
        return top
    if not np.isfinite(logits[top]):  # argmax is at the first NaN if there is one
        raise RuntimeError(IMPROBABLE)
    share = logits - logits[top]
    share *= np.float32(1 / sampling.temperature)
    np.exp(share, out=share)
    return _draw_numpy(share, float(torch.rand(1, dtype=torch.float64, generator=generator)))


def _draw_numpy(share_W: np.ndarray, chance: float) -> int:
    """A word by its share, of any sum above 0, from a number in [0, 1): the part of the words first, then the word.

    A word whose share is 0 is never drawn.
    """
    below = np.add.reduceat(share_W, np.arange(0, len(share_W), PART)).astype(np.float64).cumsum()
    wanted = chance * below[-1]
    part = int(np.searchsorted(below, wanted, side="right"))
    part = min(part, int(np.searchsorted(below, below[-1])))  # a chance that rounding made 1
    words = share_W[part * PART : (part + 1) * PART]
    inside = words.cumsum(dtype=np.float64)
    word = int(np.searchsorted(inside, wanted - (below[part - 1] if part else 0.0), side="right"))
    return part * PART + (word if word < len(words) else int(words.nonzero()[0][-1]))


def draw(share_W: Tensor, generator: torch.Generator) -> int:
    """A token by its probability, from one random number: ``torch.multinomial`` draws one for every word.

    A word of probability 0 is never drawn.

    Raises:
        RuntimeError: probabilities that are NaN, or all 0.
    """
    below_W = share_W.double().cumsum(dim=-1)
    if not below_W[-1] > 0:
        raise RuntimeError(IMPROBABLE)
    chance = torch.rand(1, dtype=torch.float64, device=share_W.device, generator=generator) * below_W[-1]
    found = int(torch.searchsorted(below_W, chance, right=True))
    return found if found < len(share_W) else int(share_W.nonzero()[-1])  # a chance that rounding made 1
