"""Running log-sums against their definition, pair by pair, in float64."""

import pytest
import torch

from latte.ops import log_sum
from latte.tokens import Tokens
from tests.ops.helpers import assert_close, generator, normal

T = 40


@pytest.mark.parametrize("backend", ["reference", None])
@pytest.mark.parametrize("fading", [False, True])
def test_shares_and_what_is_kept_are_those_of_the_sum(backend, fading):
    """e^{k_t - a_t} and a_{t-1} - w_t - a_t, with a_t the log of a sum over the tokens of t's document."""
    g = generator(0)
    k, decay = normal(g, 2, T, 3), normal(g, 2, T, 3).abs()
    mask, reset = torch.rand(2, T, generator=g) > 0.2, torch.zeros(2, T, dtype=torch.bool)
    reset[0, 11] = reset[1, 5] = reset[1, 30] = mask[0, 0] = True
    tokens = Tokens.of(k, mask=mask, reset=reset)
    share, log_kept, after = log_sum(k, decay if fading else None, tokens=tokens, backend=backend)
    faded = torch.where(mask[..., None], decay if fading else torch.zeros_like(decay), 0.0).cumsum(1)
    exponent = k[:, None] - (faded[:, :, None] - faded[:, None])  # (B, T, S, D)
    seen = tokens.seen_BTS(causal=True)[..., None]
    weights = torch.where(seen, exponent, -torch.inf).exp()
    totals = weights.sum(2)
    own = weights.diagonal(dim1=1, dim2=2).mT
    assert_close(share[mask], (own / totals)[mask])
    earlier = (1 - own / totals)[mask]
    assert_close(log_kept[mask].exp(), earlier)
    assert (earlier == 0).any()  # first tokens of documents, which keep nothing
    assert (log_kept[~mask] == 0).all()
    assert_close(after.log_norm_BD[mask[:, -1]], totals[:, -1].log()[mask[:, -1]])
