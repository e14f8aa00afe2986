"""Lifetimes of tokens that may be asked for: kept tokens shared between prediction and recall, whatever the length.

With a recency r a token of content score s is kept for (s - level) / r thousand tokens, where ``level`` is the score
that falls out now; so the number of tokens that are kept at a time is the mean of that over tokens. Tokens worth
recalling stay without regard to their age. So that there are always about n of them, one that is among the best part u
of all tokens may stay for n / u tokens: until then about n as good ones have come.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from latte.layers.window import PLACES

#: Parts of the text at whose bounds log lifetimes are fixed; between and beyond them they are linear in the score.
PARTS = (1 / 16, 1 / 128)
NARROWEST = 1e-6  # between the two bounds


def level_of(score_NG: Tensor, kept: float, recency_G: Tensor | float) -> Tensor:
    """The score (G,) that falls out now if ``kept`` tokens of a text with these scores are kept: mean (s - level)+ is
    kept r / PLACES.
    """
    # The sum of (s - level)+ is the largest, over k, of the sum of the best k minus k levels.
    best_NG = score_NG.sort(dim=0, descending=True).values.cumsum(dim=0)
    count_N1 = torch.arange(1, len(score_NG) + 1, device=score_NG.device)[:, None]
    return ((best_NG - kept * recency_G / PLACES * len(score_NG)) / count_N1).amax(dim=0)


def lifetimes(worth_NG: Tensor, kept: float) -> tuple[Tensor, Tensor]:
    """Slope and offset (G,) of the log of lifetimes in PLACES tokens, linear in what tokens are worth, for ``kept`` of
    them at a time.
    """
    few, fewer = PARTS
    low_G, high_G = (worth_NG.quantile(1 - part, dim=0) for part in PARTS)
    slope_G = math.log(few / fewer) / (high_G - low_G).clamp(min=NARROWEST)
    return slope_G, math.log(kept / few / PLACES) - slope_G * low_G
