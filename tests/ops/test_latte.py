"""Latte against its equations written out: softmaxes over tokens, one query at a time."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latte.ops import LatteState, bidirectional_latte, causal_latte
from latte.tokens import Tokens
from tests.ops.helpers import CAUSAL, assert_close, flags, generator, normal


def direct(p, k, v, sees):
    """y_t = sum_l p(l|t) sum_s p(s|l,t) v_s with p(s|l,t) a softmax over the s that ``sees[b, t]`` shows."""
    y = torch.zeros_like(v)
    for b, t in torch.cartesian_prod(*(torch.arange(n) for n in v.shape[:2])).tolist():
        s = sees[b, t].nonzero()[:, 0]
        if len(s):
            y[b, t] = torch.einsum("hl,shl,shv->hv", p[b, t], k[b, s].softmax(0), v[b, s])
    return y


def sight(mask, reset, causal):
    """(B, T, S): whether real token t sees real token s of its own document."""
    document = reset.long().cumsum(1)
    same = (document[:, :, None] == document[:, None, :]) & mask[:, :, None] & mask[:, None, :]
    return same.tril() if causal else same


@given(T=st.sampled_from([1, 2, 9, 17, 34, 66]), seed=st.integers(0, 10**6), size=st.sampled_from([1.0, 1e4]))
@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_latte_is_a_softmax_over_tokens_for_every_latent(direction, T, seed, size):
    g, causal = generator(seed), direction == "causal"
    p, k, v = normal(g, 2, T, 2, 3).softmax(-1), size * normal(g, 2, T, 2, 3), normal(g, 2, T, 2, 4)
    mask, reset = flags(g, 2, T, 0.8), flags(g, 2, T, 0.1)
    every, none = torch.ones_like(mask), torch.zeros_like(reset)
    for m, r in ((None, None), (mask, None), (None, reset), (mask, reset)):
        sees = sight(every if m is None else m, none if r is None else r, causal)
        tokens = Tokens.of(p, mask=m, reset=r)
        if causal:
            y, _ = causal_latte(p, k, v, tokens=tokens)
        else:
            y = bidirectional_latte(p, k, v, tokens=tokens)
            assert_close(bidirectional_latte(p, k, v, tokens=tokens, backend="reference"), y)
        assert_close(y, direct(p, k, v, sees))


def test_the_state_holds_log_normalisers_and_means_of_values():
    g = generator(0)
    p, k, v = normal(g, 2, 70, 2, 3).softmax(-1), normal(g, 2, 70, 2, 3), normal(g, 2, 70, 2, 4)
    _, state = causal_latte(p, k, v)
    assert_close(state.log_norm_BHM, k.logsumexp(1))
    assert_close(state.mean_BHMV, torch.einsum("bshl,bshv->bhlv", k.softmax(1), v))


@pytest.mark.parametrize("backend", [None, *CAUSAL["causal_latte"].backends])
def test_blocks_of_2048_tokens_join_without_a_seam(backend):
    """Past the block edge, with documents that end before it, on it and behind it."""
    T, g = 2048 + 70, generator(1)
    p, k, v = normal(g, 3, T, 1, 2).softmax(-1), normal(g, 3, T, 1, 2), normal(g, 3, T, 1, 2)
    reset = torch.zeros(3, T, dtype=torch.bool)
    reset[1, [5, 2048, 2049]] = True
    reset[2, [2040, 2100]] = True
    y, state = causal_latte(p, k, v, tokens=Tokens.of(p, reset=reset), backend=backend)
    for b in range(3):
        starts = [0, *reset[b].nonzero()[:, 0].tolist(), T]
        for start, stop in itertools.pairwise(starts):
            for t in {start, min(start + 70, stop - 1), stop - 1}:
                seen = slice(start, t + 1)
                expected = torch.einsum("hl,shl,shv->hv", p[b, t], k[b, seen].softmax(0), v[b, seen])
                assert_close(y[b, t], expected, what=f"row {b}, token {t}")
    assert_close(state.log_norm_BHM[2], k[2, 2100:].logsumexp(0))


@pytest.mark.parametrize("tokens", [70, 2048, 2048 + 70])
def test_rows_written_at_once_are_those_joined_for_gradients(tokens):
    g = generator(2)
    p, k, v = normal(g, 2, tokens, 3, 4).softmax(-1), normal(g, 2, tokens, 3, 4), normal(g, 2, tokens, 3, 5)
    joined, _ = causal_latte(p, k, v.requires_grad_(), backend="torch")
    with torch.no_grad():
        written, _ = causal_latte(p, k, v, backend="torch")
    assert torch.equal(written, joined)


def test_keys_far_below_all_before_them_still_count_for_nothing_and_above_for_all():
    """A key 1e4 above the others takes all weight from the moment it is read; one 1e4 below takes none."""
    k = torch.tensor([0.0, 1e4, 0.0, -1e4, 2e4])[None, :, None, None]
    v = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])[None, :, None, None]
    for backend in ("reference", "torch", None):
        y, _ = causal_latte(torch.ones_like(k), k, v, backend=backend)
        assert y.flatten().tolist() == [1, 2, 2, 2, 5]


def test_a_carried_state_weighs_as_much_as_the_tokens_it_read():
    """Two tokens of logit 0 in the state, one more read now: the mean of three."""
    state = LatteState(torch.full((1, 1, 1), 2.0, dtype=torch.float64).log(), torch.full((1, 1, 1, 1), 6.0))
    one = torch.ones(1, 1, 1, 1)
    for backend in ("reference", "torch", None):
        y, after = causal_latte(one, 0 * one, 3 * one, state=state, backend=backend)
        assert_close(y.flatten(), torch.tensor([5.0]))
        assert_close(after.log_norm_BHM.exp().flatten(), torch.tensor([3.0]), 1e-6)


def test_bidirectional_gradients():
    g = generator(2)
    for T in (1, 5):
        p, k, v = (normal(g, 2, T, 2, 3).requires_grad_() for _ in range(3))
        tokens = Tokens.of(p, mask=flags(g, 2, T, 0.8), reset=flags(g, 2, T, 0.3))

        def function(p, k, v, tokens=tokens):
            return bidirectional_latte(p.softmax(-1), k, v, tokens=tokens)

        assert torch.autograd.gradcheck(function, (p, k, v), fast_mode=True)
        assert torch.autograd.gradcheck(lambda p, k, v: bidirectional_latte(p, k, v), (p, k, v), fast_mode=True)


@pytest.mark.parametrize("backend", ["reference", *CAUSAL["causal_latte"].backends])
def test_large_logits_keep_their_digits_in_float32(backend):
    """Keys around 1e4 that differ by a little: what float32 rounds off a log-normaliser of 1e4 is 1e-3 of a weight."""
    g = generator(5)
    p, k, v = normal(g, 2, 70, 2, 3).softmax(-1), 1e4 + normal(g, 2, 70, 2, 3), normal(g, 2, 70, 2, 4)
    p, k, v = p.float(), k.float(), v.float()
    y, state = causal_latte(p, k, v, backend=backend)
    expected, after = causal_latte(p.double(), k.double(), v.double(), backend="reference")
    assert_close(y, expected, 2e-6)
    assert_close(state.mean_BHMV, after.mean_BHMV, 2e-6)
    assert_close(state.log_norm_BHM, after.log_norm_BHM, 1e-9)


@pytest.mark.parametrize("backend", ["reference", "torch", None])
def test_a_nan_among_the_keys_is_not_taken_for_padding(backend):
    g = generator(3)
    p, k, v = normal(g, 1, 70, 2, 3).softmax(-1), normal(g, 1, 70, 2, 3), normal(g, 1, 70, 2, 5)
    k[0, 40] = torch.nan
    y, state = causal_latte(p, k, v, backend=backend)
    assert y[0, 40:].isnan().all()
    assert state.mean_BHMV.isnan().all()
