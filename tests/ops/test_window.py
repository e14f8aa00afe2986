"""The window against torch's own attention with a band mask, and against its formula where torch has none."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from latte.ops import softmax_attention, window_attention
from latte.tokens import Tokens
from tests.ops.helpers import CAUSAL, assert_close, flags, generator, normal

BACKENDS = ["reference", None, *CAUSAL["window_attention, left 0"].backends]


def places(mask, reset):
    """Where each token stands among the real tokens of its document, counted one by one."""
    place, document = torch.zeros_like(mask, dtype=torch.long), torch.zeros_like(mask, dtype=torch.long)
    for b, (row, starts) in enumerate(zip(mask.tolist(), reset.tolist(), strict=True)):
        count, number = 0, 0
        for t, (real, start) in enumerate(zip(row, starts, strict=True)):
            if start:
                count, number = 0, number + 1
            place[b, t], document[b, t] = count, number
            count += real
    return place, document


def band(mask, reset, left, right):
    place, document = places(mask, reset)
    distance = place[:, :, None] - place[:, None, :]
    near = (distance <= left) & (distance >= -right)
    return near & (document[:, :, None] == document[:, None, :]) & mask[:, None, :] & mask[:, :, None]


def sdpa(q, k, v, seen, scale=None):
    """torch's attention, grouped heads included; padding, which sees nothing, gives 0."""
    y = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=seen[:, None], enable_gqa=True, scale=scale
    )
    return torch.nan_to_num(y.transpose(1, 2)) * seen.any(-1)[..., None, None]


@given(
    T=st.sampled_from([1, 2, 5, 16, 31, 65, 130]),
    left=st.sampled_from([0, 1, 2, 7, 64, 200]),
    right=st.sampled_from([0, 0, 1, 5, 64]),
    groups=st.sampled_from([1, 2, 4]),
    masked=st.booleans(),
    documents=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
    seed=st.integers(0, 10**6),
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_window_is_torch_attention_with_a_band_mask(
    backend, T, left, right, groups, masked, documents, scale, seed
):
    g = generator(seed)
    q, k, v = normal(g, 2, T, 4, 6), normal(g, 2, T, groups, 6), normal(g, 2, T, groups, 3)
    mask = flags(g, 2, T, 0.7) if masked else torch.ones(2, T, dtype=torch.bool)
    reset = flags(g, 2, T, 0.1) if documents else torch.zeros(2, T, dtype=torch.bool)
    expected = sdpa(q, k, v, band(mask, reset, left, right), scale)
    tokens = Tokens.of(q, mask=mask if masked else None, reset=reset if documents else None)
    y, _, state = window_attention(q, k, v, left=left, right=right, scale=scale, tokens=tokens, backend=backend)
    assert_close(y, expected)
    assert (state is None) == (right > 0)


@given(T=st.sampled_from([1, 6, 17, 66]), left=st.sampled_from([0, 3, 9]), seed=st.integers(0, 10**6))
@pytest.mark.parametrize("backend", BACKENDS)
def test_softcap_bounds_logits_by_a_scaled_tanh(backend, T, left, seed):
    g = generator(seed)
    q, k, v = 5 * normal(g, 2, T, 2, 4), normal(g, 2, T, 2, 4), normal(g, 2, T, 2, 3)
    every, none = torch.ones(2, T, dtype=torch.bool), torch.zeros(2, T, dtype=torch.bool)
    logits = 3.0 * torch.tanh(torch.einsum("bthk,bshk->bhts", q, k) / 2 / 3.0)
    weights = logits.masked_fill(~band(every, none, left, 0)[:, None], -torch.inf).softmax(-1)
    y, *_ = window_attention(q, k, v, left=left, softcap=3.0, backend=backend)
    assert_close(y, torch.einsum("bhts,bshv->bthv", weights, v))


@given(
    T=st.sampled_from([1, 4, 9, 20, 67]),
    left=st.sampled_from([0, 2, 5]),
    sinks=st.sampled_from([1, 2, 7]),
    turned=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    cut=st.integers(0, 66),
    seed=st.integers(0, 10**6),
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_sinks_are_the_first_tokens_of_the_document_under_the_same_softmax(
    backend, T, left, sinks, turned, softcap, cut, seed
):
    """One pass, and the same row in two pieces, with padding and packed documents."""
    g = generator(seed)
    q, k, v = normal(g, 2, T, 4, 4), normal(g, 2, T, 2, 4), normal(g, 2, T, 2, 3)
    sink_query = normal(g, 2, T, 4, 4) if turned else None
    mask, reset = flags(g, 2, T, 0.8), flags(g, 2, T, 0.1)
    place, document = places(mask, reset)
    near = band(mask, reset, left, 0)
    same = (document[:, :, None] == document[:, None, :]) & mask[:, None, :] & mask[:, :, None]
    first = same & (place < sinks)[:, None, :] & (place[:, :, None] - place[:, None, :] > left)
    own, sunk = (
        torch.einsum("bthk,bshk->bhts", x, k.repeat_interleave(2, 2)) / 2
        for x in (q, q if sink_query is None else sink_query)
    )
    logits = torch.where(first[:, None], sunk, own)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    weights = torch.nan_to_num(logits.masked_fill(~(near | first)[:, None], -torch.inf).softmax(-1))
    expected = torch.einsum("bhts,bshv->bthv", weights, v.repeat_interleave(2, 2))

    tokens = Tokens.of(q, mask=mask, reset=reset)

    def run(start, stop, state=None):
        part = slice(start, stop)
        return window_attention(
            q[:, part],
            k[:, part],
            v[:, part],
            left=left,
            sinks=sinks,
            softcap=softcap,
            sink_query=None if sink_query is None else sink_query[:, part],
            tokens=tokens.part(start, stop),
            state=state,
            backend=backend,
        )

    assert_close(run(0, T)[0], expected)
    if 0 < cut < T:
        one, _, state = run(0, cut)
        two, *_ = run(cut, T, state)
        assert_close(torch.cat([one, two], 1), expected, what="two pieces")


def test_the_ring_holds_the_last_tokens_each_in_its_slot():
    """The token at place n of its document stands in slot n mod left."""
    k = torch.arange(7.0)[None, :, None, None]
    *_, state = window_attention(k, k, k, left=3)
    assert state.keys_BRGK.flatten().tolist() == [6, 4, 5]
    token = k[:, :1] + 7
    with pytest.raises(ValueError, match="without the number of tokens it has read"):
        window_attention(token, token, token, left=3, state=state)
    *_, state = window_attention(
        token, token, token, left=3, state=state, tokens=Tokens.of(token, start=torch.tensor([7]))
    )
    assert state.keys_BRGK.flatten().tolist() == [6, 7, 5]


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_of_2048_queries_join_without_a_seam(backend):
    T, g = 2048 + 70, generator(3)
    q, k, v = (normal(g, 1, T, 1, 2) for _ in range(3))
    y, *_ = window_attention(q, k, v, left=100, backend=backend)
    for t in (2047, 2048, 2060, T - 1):
        seen = slice(t - 100, t + 1)
        weights = (k[0, seen, 0] @ q[0, t, 0] / 2**0.5).softmax(0)
        assert_close(y[0, t, 0], weights @ v[0, seen, 0], what=f"token {t}")


@given(
    T=st.sampled_from([1, 3, 18]),
    groups=st.sampled_from([1, 2, 4]),
    causal=st.booleans(),
    masked=st.booleans(),
    documents=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_full_attention_is_torch_attention(T, groups, causal, masked, documents, seed):
    g = generator(seed)
    q, k, v = normal(g, 2, T, 4, 6), normal(g, 2, T, groups, 6), normal(g, 2, T, groups, 3)
    mask = flags(g, 2, T, 0.7) if masked else torch.ones(2, T, dtype=torch.bool)
    reset = flags(g, 2, T, 0.2) if documents else torch.zeros(2, T, dtype=torch.bool)
    tokens = Tokens.of(q, mask=mask if masked else None, reset=reset if documents else None)
    y, state = softmax_attention(q, k, v, causal=causal, tokens=tokens)
    assert_close(y, sdpa(q, k, v, band(mask, reset, T, 0 if causal else T)))
    assert (state is None) == (not causal)
