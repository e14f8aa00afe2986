"""What tokens are worth for prediction: a Poisson regression of the attention that they later get, by token and age.

    E[attention to token j from a query a tokens behind it] = exp(u . x_j + b - r a / 1000)

per key/value head, x_j being the layer's input. With the score s_j = u . x_j + r j / 1000 the tokens with the best
scores are those with the largest expected attention, whatever the query's place, so the recency r is fitted like u.
The likelihood weighs tokens by the attention that they get: a fit to its logarithm would be as exact for the many
tokens that get next to none, and miss the few that matter.

The objective is convex. Only samples of tokens are kept, and one layer is fitted at a time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from latte.extend.remember import attention_blocks
from latte.layers.window import PLACES
from latte.tokens import Tokens

if TYPE_CHECKING:
    from latte.extend.layer import ExtendedMixer

#: Ages at which attention is summed apart: up to 4 windows, 8, 16, and beyond.
WINDOWS = (4, 8, 16)
LEAST_RECENCY = 0.01  # fitted: below it tokens would never make room for others
ITERATIONS = 100
LARGEST = 12.0  # exponents of a step that is tried are cut there


class Samples(NamedTuple):
    """Tokens with the attention that they get from beyond the window, in A ranges of age."""

    x_ND: Tensor  # in half precision
    received_NAG: Tensor  # sums over queries, means over the heads of each key/value head
    queries_NA: Tensor  # how many queries
    ages_NA: Tensor  # sums over these queries


@torch.no_grad()
def sample(mixer: ExtendedMixer, x_BTD: Tensor, tokens: Tokens, most: int, first: int = 0) -> Samples:
    """Up to ``most`` tokens of these rows, evenly spread from number ``first`` on, and the attention to each.

    Sinks, padding and tokens that no later query sees from beyond the window are left out.
    """
    B, T = x_BTD.shape[:2]
    edges = [0, *(mixer.pretrained.size * many for many in WINDOWS), T]
    received_ABTG = x_BTD.new_zeros(len(edges) - 1, B, T, mixer.config.kv_heads, dtype=torch.float32)
    queries_ABT = x_BTD.new_zeros(len(edges) - 1, B, T, dtype=torch.float32)
    ages_ABT = torch.zeros_like(queries_ABT)
    place_BT = tokens.place_BT
    for block in attention_blocks(mixer, x_BTD, tokens):
        end, queries = block.end, block.beyond_BCS.shape[1]
        age_BCS = place_BT[:, end - queries : end, None] - place_BT[:, None, :end]
        heads_BGCS = block.weights_BGCRS.mean(dim=3)
        for nth, (low, high) in enumerate(pairwise(edges)):
            within_BCS = (block.beyond_BCS & (age_BCS > low) & (age_BCS <= high)).float()
            if not within_BCS.any():
                continue
            received_ABTG[nth, :, :end] += (heads_BGCS * within_BCS[:, None]).sum(dim=2).transpose(1, 2)
            queries_ABT[nth, :, :end] += within_BCS.sum(dim=1)
            ages_ABT[nth, :, :end] += (within_BCS * age_BCS).sum(dim=1)
    worth_N2 = (queries_ABT.sum(dim=0) > 0).nonzero()
    stride = max(1, -(-len(worth_N2) // most))
    rows, columns = worth_N2[first % stride :: stride].unbind(dim=1)
    return Samples(
        x_BTD[rows, columns].half(),
        received_ABTG[:, rows, columns].transpose(0, 1).contiguous(),
        queries_ABT[:, rows, columns].T.contiguous(),
        ages_ABT[:, rows, columns].T.contiguous(),
    )


class Rate(NamedTuple):
    """A fitted rate of attention."""

    weight_GD: Tensor
    recency_G: Tensor
    explained_G: Tensor  # part of the deviance that is explained: 0 if all tokens were alike, 1 if all is known


def fit_rate(samples: Samples, ridge: float, recency: float | None = None) -> Rate:
    """The rate of one layer; a ``recency`` that is given is not fitted.

    Args:
        samples: at least one token.
        ridge: weight of the squared coefficients, of inputs with a spread of 1.
        recency: by how much scores rise in PLACES tokens.

    Raises:
        ValueError: no query sees any of the tokens from beyond the window.
    """
    if not samples.queries_NA.sum() > 0:
        raise ValueError("no query sees a token from beyond the window")
    x_ND, queries_NA = samples.x_ND.float(), samples.queries_NA
    spread_D = x_ND.std(dim=0, unbiased=False).clamp(min=1e-6)
    x_ND = (x_ND - x_ND.mean(dim=0)) / spread_D
    age_NA1 = (samples.ages_NA / queries_NA.clamp(min=1) / PLACES)[..., None]
    weight_NA1 = (queries_NA / queries_NA.sum())[..., None]
    rate_NAG = samples.received_NAG / queries_NA.clamp(min=1)[..., None]
    mean_G = (weight_NA1 * rate_NAG).sum(dim=(0, 1)).clamp(min=1e-30)
    rate_NAG = rate_NAG / mean_G
    G = rate_NAG.shape[2]
    coefficients_DG, constant_G = x_ND.new_zeros(x_ND.shape[1], G), x_ND.new_zeros(G)
    recency_G = x_ND.new_full((G,), 1.0 if recency is None else recency)
    unknown = [coefficients_DG, constant_G, *([recency_G] if recency is None else [])]
    for tensor in unknown:
        tensor.requires_grad_()
    optimizer = torch.optim.LBFGS(unknown, max_iter=ITERATIONS, history_size=20, line_search_fn="strong_wolfe")

    def log_rate() -> Tensor:
        return ((x_ND @ coefficients_DG)[:, None] + constant_G - recency_G * age_NA1).clamp(max=LARGEST)

    def objective() -> Tensor:
        optimizer.zero_grad()
        log_NAG = log_rate()
        loss = (weight_NA1 * (log_NAG.exp() - rate_NAG * log_NAG)).sum() + ridge * coefficients_DG.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer.step(objective)
    with torch.no_grad():
        found_G = _deviance(rate_NAG, log_rate(), weight_NA1)
        explained_G = 1 - found_G / _deviance(rate_NAG, torch.zeros_like(rate_NAG), weight_NA1).clamp(min=1e-30)
        if recency is None:
            recency_G.clamp_(min=LEAST_RECENCY)
        return Rate((coefficients_DG / spread_D[:, None]).mT.contiguous(), recency_G.detach(), explained_G)


def _deviance(rate_NAG: Tensor, log_NAG: Tensor, weight_NA1: Tensor) -> Tensor:
    """Of a Poisson distribution, half of it, per head."""
    own = torch.xlogy(rate_NAG, rate_NAG) - rate_NAG
    return (weight_NA1 * (own - (rate_NAG * log_NAG - log_NAG.exp()))).sum(dim=(0, 1))
