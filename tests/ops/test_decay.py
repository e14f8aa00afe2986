"""Linear attention with and without decay against its quadratic sum, in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latte.ops import decay_attention, document_attention
from latte.tokens import Tokens
from tests.ops.helpers import CAUSAL, assert_close, flags, generator, normal

BACKENDS = ["reference", None, *CAUSAL["decay_attention, none"].backends]


def quadratic(q, k, v, gate, mask, document):
    """y_t = sum_{s<=t} sum_i q_ti e^{g_{s+1} + ... + g_t}_i k_si v_s, every pair written out; gate (B, T, H, K)."""
    T = mask.shape[1]
    total = torch.where(mask[..., None, None], gate, 0.0).cumsum(1)
    y = torch.zeros_like(v)
    for t in range(T):
        seen = (mask & (document == document[:, t, None]) & mask[:, t, None])[:, : t + 1, None]
        fade = (total[:, t, None] - total[:, : t + 1]).exp()
        weight = torch.einsum("bhk,bshk,bshk->bsh", q[:, t], k[:, : t + 1], fade) * seen
        y[:, t] = torch.einsum("bsh,bshv->bhv", weight, v[:, : t + 1])
    return y


@given(
    T=st.sampled_from([1, 2, 15, 17, 65, 81]),
    axes=st.sampled_from(["", "H", "BTH", "BTHK"]),
    strength=st.sampled_from([0.01, 1.0, 30.0]),
    seed=st.integers(0, 10**6),
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_decay_attention_is_its_quadratic_sum(backend, T, axes, strength, seed):
    g = generator(seed)
    q, k, v = normal(g, 2, T, 2, 3), normal(g, 2, T, 2, 3), normal(g, 2, T, 2, 4)
    sizes = {"B": 2, "T": T, "H": 2, "K": 3}
    gate = -strength * normal(g, *(sizes[a] for a in axes)).abs() if axes else None
    full = {"": 0, "H": (None, None, slice(None), None), "BTH": (..., None), "BTHK": ...}[axes]
    each = torch.zeros_like(q) if gate is None else gate[full].expand_as(q)
    mask, reset = flags(g, 2, T, 0.8), flags(g, 2, T, 0.08)
    y, _ = decay_attention(q, k, v, gate, tokens=Tokens.of(q, mask=mask, reset=reset), backend=backend)
    assert_close(y, quadratic(q, k, v, each, mask, reset.long().cumsum(1)))


@given(T=st.sampled_from([1, 2, 17, 70]), seed=st.integers(0, 10**6), masked=st.booleans(), documents=st.booleans())
@pytest.mark.parametrize("backend", ["reference", None])
def test_document_attention_sums_over_the_whole_document_once(backend, T, seed, masked, documents):
    g = generator(seed)
    q, k, v = normal(g, 2, T, 2, 3), normal(g, 2, T, 2, 3), normal(g, 2, T, 2, 4)
    mask = flags(g, 2, T, 0.8) if masked else torch.ones(2, T, dtype=torch.bool)
    reset = flags(g, 2, T, 0.1) if documents else torch.zeros(2, T, dtype=torch.bool)
    document = reset.long().cumsum(1)
    same = (document[:, :, None] == document[:, None, :]) & mask[:, :, None] & mask[:, None, :]
    expected = torch.einsum("bthk,bshk,bts,bshv->bthv", q, k, same.double(), v)
    tokens = Tokens.of(q, mask=mask if masked else None, reset=reset if documents else None)
    y = document_attention(q, k, v, tokens=tokens, backend=backend)
    assert_close(y, expected)


@pytest.mark.parametrize("backend", ["torch", None])
def test_blocks_of_2048_tokens_join_without_a_seam(backend):
    """A slow fade over the block edge, with a document that starts right behind it in the second row."""
    T, g = 2048 + 70, generator(1)
    q, k, v, gate = (normal(g, 2, T, 1, 2) for _ in range(4))
    gate = -0.001 * gate.abs()
    reset = torch.zeros(2, T, dtype=torch.bool)
    reset[1, [3, 2048]] = True
    y, state = decay_attention(q, k, v, gate, tokens=Tokens.of(q, reset=reset), backend=backend)
    expected, after = decay_attention(q, k, v, gate, tokens=Tokens.of(q, reset=reset), backend="reference")
    assert_close(y, expected)
    assert_close(state.sum_BHKV, after.sum_BHKV)


@pytest.mark.parametrize("backend", ["torch", None])
def test_a_gate_that_forgets_all_overflows_nothing(backend):
    """Gates of -1e4 a token: each output is that of its own key alone, and gradients are finite."""
    g = generator(2)
    q, k, v = (normal(g, 1, 70, 1, 3, dtype=torch.float32).requires_grad_() for _ in range(3))
    gate = torch.full((1, 70, 1, 3), -1e4, requires_grad=True)
    y, _ = decay_attention(q, k, v, gate, backend=backend)
    assert_close(y, (q * k).sum(-1, keepdim=True) * v)
    for gradient in torch.autograd.grad(y.sum(), (q, k, v, gate)):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("axes", ["BTH", "BTHK"])
@pytest.mark.parametrize("documents", [False, True])
def test_weak_gates_behind_strong_ones_keep_their_digits(axes, documents):
    """Thirty tokens that forget all, then ones that forget little: float32 as exact as if the strong had not been."""
    T, g = 64, generator(4)
    q, k, v = (normal(g, 2, T, 2, 3) for _ in range(3))
    gate = -normal(g, 2, T, 2, *([3] if axes == "BTHK" else [])).abs()
    gate[:, :30] *= 300
    gate[:, 30:] *= 0.05
    reset = torch.zeros(2, T, dtype=torch.bool)
    reset[:, [20, 50]] = True
    q, k, v, gate = (x.float() for x in (q, k, v, gate))
    kwargs = {"tokens": Tokens.of(q, reset=reset if documents else None)}
    y, state = decay_attention(q, k, v, gate, backend="torch", **kwargs)
    wide = [x.double() for x in (q, k, v, gate)]
    expected, after = decay_attention(*wide, backend="reference", **kwargs)
    assert_close(y, expected, 2e-6)
    assert_close(state.sum_BHKV, after.sum_BHKV, 2e-6)
