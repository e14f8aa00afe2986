"""Log-linear attention against its quadratic mask, its recurrence as published, and plain decay, in float64."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latte.ops import LogLinearState, decay_attention, log_linear_attention
from latte.tokens import Tokens
from tests.ops.helpers import assert_close, flags, generator, normal
from tests.ops.test_long import Memory

BACKENDS = ["reference", "torch", None]
H, K, V, LEVELS = 2, 3, 4, 9


def draw(g, B, T, levels=LEVELS, strength=0.05, dtype=torch.float64):
    """q, k, v, log decay, level weights."""
    q, k, v, weights = (normal(g, B, T, H, width, dtype=dtype) for width in (K, K, V, levels))
    return q, k, v, -strength * normal(g, B, T, H, dtype=dtype).abs(), weights


def level(t, s):
    """0 for t itself; else the one l with bit l - 1 of t set and s in the block of 2^(l-1) before it."""
    if s == t:
        return 0
    found = [n for n in range(1, 40) if t >> (n - 1) & 1 and s >> (n - 1) == (t >> (n - 1)) - 1]
    assert len(found) == 1
    return found[0]


def quadratic(q, k, v, gate, weights):
    """((Q K^T) . M) V of one document (T, H, ...), M_ts = w_t^(l(t,s)) e^{g_{s+1} + ... + g_t}."""
    T = q.shape[0]
    mask_HTS = torch.zeros(q.shape[1], T, T, dtype=q.dtype)
    for t, s in itertools.combinations_with_replacement(range(T), 2):
        t, s = s, t
        mask_HTS[:, t, s] = weights[t, :, level(t, s)] * gate[s + 1 : t + 1].sum(0).exp()
    return torch.einsum("thk,shk,hts,shv->thv", q, k, mask_HTS, v)


def as_published(q, k, v, gate, weights):
    """The Fenwick recurrence of one document: blocks join when the next token comes, not at once."""
    levels = [q.new_zeros(H, K, V) for _ in range(40)]
    outputs = []
    for t in range(q.shape[0]):
        if t:
            lowest = 1 + (t & -t).bit_length() - 1
            levels[lowest] = sum(levels[:lowest])
            levels[:lowest] = [q.new_zeros(H, K, V) for _ in range(lowest)]
        levels = [gate[t].exp()[:, None, None] * state for state in levels]
        levels[0] = k[t, :, :, None] * v[t, :, None, :]
        assert sum(bool((state != 0).any()) for state in levels) <= 1 + t.bit_count()
        outputs.append(sum(weights[t, :, n, None] * (q[t, :, None] @ levels[n])[:, 0] for n in range(LEVELS)))
    return torch.stack(outputs)


@pytest.mark.parametrize("T", [1, 2, 7, 64, 130])
def test_the_mask_is_the_published_recurrence(T):
    inputs = [x[0] for x in draw(generator(T), 1, T)]
    assert_close(as_published(*inputs), quadratic(*inputs))


@given(
    T=st.sampled_from([1, 2, 15, 63, 64, 65, 100, 129]),
    masked=st.booleans(),
    share=st.sampled_from([0.0, 0.01, 0.1, 0.5]),
    strength=st.sampled_from([0.0, 0.05, 30.0]),
    seed=st.integers(0, 10**6),
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_log_linear_attention_is_its_quadratic_mask(backend, T, masked, share, strength, seed):
    """Each document of each row by itself, its padding taken out."""
    g, B = generator(seed), 2
    inputs = draw(g, B, T, strength=strength)
    mask = flags(g, B, T, 0.7) if masked else torch.ones(B, T, dtype=torch.bool)
    reset = flags(g, B, T, share)
    y, _ = log_linear_attention(*inputs, tokens=Tokens.of(inputs[0], mask=mask, reset=reset), backend=backend)
    document = reset.long().cumsum(1)
    expected = torch.zeros_like(y)
    for row in range(B):
        for number in document[row].unique():
            chosen = (document[row] == number) & mask[row]
            if chosen.any():
                expected[row, chosen] = quadratic(*(x[row, chosen] for x in inputs))
    assert_close(y, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_may_stand_anywhere_in_the_tree(backend):
    """Every cut of a document of 150 tokens, and rows that are at different places."""
    T, g = 150, generator(0)
    inputs = draw(g, 1, T)
    wanted = quadratic(*(x[0] for x in inputs))
    kept = {}
    for cut in range(T) if backend != "reference" else (1, 63, 64, 65, 127, 128, 149):
        state = None
        if cut:
            _, state = log_linear_attention(*(x[:, :cut] for x in inputs))
        rest = [x[:, cut:] for x in inputs]
        tokens = Tokens.of(rest[0], start=torch.tensor([cut])) if cut else None
        y, after = log_linear_attention(*rest, state=state, tokens=tokens, backend=backend)
        assert_close(y[0], wanted[cut:], what=f"cut at {cut}")
        kept[cut] = state
        assert after.levels_BLHKV.shape[1] == T.bit_length()
    cuts = torch.tensor([1, 63, 64, 127, 149])
    levels = torch.zeros(len(cuts), 8, H, K, V, dtype=torch.float64)
    for row, cut in enumerate(cuts.tolist()):
        levels[row, : cut.bit_length()] = kept[cut].levels_BLHKV[0]
    # All rows read on until the end of the document: padding on the left where there are fewer tokens.
    longest = T - 1
    mask = torch.arange(longest) >= longest - (T - cuts)[:, None]
    rows = [x[:, 1:].expand(len(cuts), *x[:, 1:].shape[1:]) for x in inputs]
    tokens = Tokens.of(rows[0], mask=mask, start=cuts)
    y, _ = log_linear_attention(*rows, state=LogLinearState(levels), tokens=tokens, backend=backend)
    assert_close(y, torch.where(mask[..., None, None], wanted[1:], 0.0))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("n", [1, 2, 3, 64, 77, 128, 200])
def test_the_state_is_one_block_for_each_bit_of_the_count(backend, n):
    q, k, v, gate, weights = draw(generator(n), 1, n)
    _, state = log_linear_attention(q, k, v, gate, weights, backend=backend)
    assert state.levels_BLHKV.shape == (1, n.bit_length(), H, K, V)
    stop = 0
    for i in reversed(range(n.bit_length())):
        start, stop = stop, stop + (1 << i if n >> i & 1 else 0)
        fade = torch.stack([gate[0, s + 1 :].sum(0) for s in range(start, stop)] or [gate.new_zeros(H)]).exp()
        pairs = torch.einsum("shk,shv->shkv", k[0, start:stop], v[0, start:stop])
        wanted = torch.einsum("sh,shkv->hkv", fade[: stop - start], pairs)
        assert_close(state.levels_BLHKV[0, i], wanted, what=f"block of {1 << i}")
    assert stop == n


@given(T=st.sampled_from([1, 17, 65, 150]), seed=st.integers(0, 10**6), carry=st.booleans(), documents=st.booleans())
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_of_one_give_decay_attention(backend, T, seed, carry, documents):
    g, B = generator(seed), 2
    first, second = draw(g, B, 37), draw(g, B, T)
    mask, reset = flags(g, B, T, 0.8), flags(g, B, T, 0.05) if documents else None
    states = [None, None]
    if carry:
        states = [op(first)[1] for op in (_plain, _ones)]
    tokens = Tokens.of(second[0], mask=mask, reset=reset, start=torch.full((B,), 37) if carry else None)
    wanted, total = _plain(second, states[0], tokens)
    y, state = _ones(second, states[1], tokens, backend)
    assert_close(y, wanted)
    assert_close(state.levels_BLHKV.sum(1), total.sum_BHKV)


def _plain(inputs, state=None, tokens=None):
    return decay_attention(*inputs[:4], state=state, tokens=tokens, backend="reference")


def _ones(inputs, state=None, tokens=None, backend=None):
    *rest, weights = inputs
    return log_linear_attention(*rest, torch.ones_like(weights), state=state, tokens=tokens, backend=backend)


def test_the_state_has_the_levels_of_the_longest_document_it_is_in():
    inputs = draw(generator(0), 3, 100)
    reset = torch.zeros(3, 100, dtype=torch.bool)
    reset[0, 95] = reset[1, 60] = reset[2, 90] = True
    for backend in BACKENDS:
        _, state = log_linear_attention(*inputs, tokens=Tokens.of(inputs[0], reset=reset), backend=backend)
        assert state.levels_BLHKV.shape[1] == 6, "40 tokens in row 1"
        assert state.whole_growth == "log"
    _, state = log_linear_attention(*inputs, tokens=Tokens.of(inputs[0], mask=torch.zeros(3, 100, dtype=torch.bool)))
    assert state.levels_BLHKV.shape[1] == 0


def test_a_state_with_spare_levels_goes_on():
    """As a compiled graph leaves it: it can't look at counts."""
    first, second = draw(generator(0), 2, 21), draw(generator(1), 2, 70)
    _, state = log_linear_attention(*first)
    spare = LogLinearState(torch.nn.functional.pad(state.levels_BLHKV, (0, 0) * 3 + (0, 2)))
    tokens = Tokens.of(second[0], start=torch.tensor([21, 21]))
    for backend in BACKENDS:
        wanted, after = log_linear_attention(*second, state=state, tokens=tokens, backend=backend)
        y, other = log_linear_attention(*second, state=spare, tokens=tokens, backend=backend)
        assert torch.equal(y, wanted)
        assert torch.equal(other.levels_BLHKV, after.levels_BLHKV)


def test_documents_that_are_too_long_are_refused():
    inputs = draw(generator(0), 2, 16, levels=5)
    _, state = log_linear_attention(*inputs)
    message = r"log_linear_attention: a document has 17 tokens, expected at most 16 with 5 level weights"
    with pytest.raises(ValueError, match=message):
        log_linear_attention(*draw(generator(0), 2, 17, levels=5))
    more = draw(generator(1), 2, 1, levels=5)
    with pytest.raises(ValueError, match=message):
        log_linear_attention(*more, state=state, tokens=Tokens.of(more[0], start=torch.tensor([16, 3])))


def test_a_document_of_full_length_may_be_followed_by_padding_and_by_another():
    """While the document of another row goes on."""
    first, more = draw(generator(0), 2, 16, levels=5), draw(generator(1), 2, 9, levels=5)
    short = torch.tensor([[True] * 16, [True] * 3 + [False] * 13])
    _, state = log_linear_attention(*first, tokens=Tokens.of(first[0], mask=short))
    reset, mask = torch.zeros(2, 9, dtype=torch.bool), torch.ones(2, 9, dtype=torch.bool)
    reset[0, 3], mask[0, :3] = True, False
    tokens = Tokens.of(more[0], start=torch.tensor([16, 3]), reset=reset, mask=mask)
    wanted = [
        quadratic(*(x[0, 3:] for x in more)),
        quadratic(*(torch.cat([a[1, :3], b[1]]) for a, b in zip(first, more, strict=True)))[3:],
    ]
    for backend in BACKENDS:
        y, _ = log_linear_attention(*more, state=state, tokens=tokens, backend=backend)
        assert_close(y[0, 3:], wanted[0])
        assert_close(y[1], wanted[1])


def test_states_that_do_not_fit_the_count_are_refused():
    inputs = draw(generator(0), 2, 3)
    _, state = log_linear_attention(*inputs)
    with pytest.raises(ValueError, match="a state was given without the number of tokens it has read"):
        log_linear_attention(*inputs, state=state)
    with pytest.raises(ValueError, match="state has 2 levels, expected at least 3 after 5 tokens"):
        log_linear_attention(*inputs, state=state, tokens=Tokens.of(inputs[0], start=torch.tensor([3, 5])))


@pytest.mark.parametrize("documents", [False, True])
def test_weak_gates_behind_strong_ones_keep_their_digits(documents):
    """Thirty tokens that forget all, then ones that forget little, in float32."""
    T = 140
    inputs = draw(generator(4), 2, T, strength=1.0)
    inputs[3][:, :30] *= 300
    inputs[3][:, 30:] *= 0.05
    reset = torch.zeros(2, T, dtype=torch.bool)
    reset[:, [20, 50] if documents else []] = True
    narrow = [x.float() for x in inputs]
    tokens = Tokens.of(narrow[0], reset=reset)
    y, state = log_linear_attention(*narrow, tokens=tokens, backend="torch")
    wanted, after = log_linear_attention(*(x.double() for x in narrow), tokens=tokens, backend="reference")
    assert_close(y, wanted, 2e-6)
    assert_close(state.levels_BLHKV, after.levels_BLHKV, 2e-6)


def test_a_gate_that_forgets_all_overflows_nothing():
    inputs = [x.requires_grad_() for x in draw(generator(2), 1, 200, dtype=torch.float32, strength=1e5)]
    q, k, v, _, weights = inputs
    y, _ = log_linear_attention(*inputs)
    assert_close(y, weights[..., :1] * (q * k).sum(-1, keepdim=True) * v)
    for gradient in torch.autograd.grad(y.sum(), inputs):
        assert torch.isfinite(gradient).all()


def test_a_long_row_is_read_in_bounded_memory_and_right_at_the_end():
    """Beyond its output, the op holds what one chunk needs, and the last output is the sum over all tokens."""
    T, levels = 1 << 15, 16
    q, k, v, gate, weights = draw(generator(5), 1, T, levels, strength=1e-4, dtype=torch.float32)
    with torch.no_grad(), Memory(q, k, v, gate, weights) as memory:
        y, state = log_linear_attention(q, k, v, gate, weights, backend="torch")
    # Beside y: k, v and gate with padding out (views here), the numbering of tokens, and scratch for one chunk.
    assert memory.peak < 2 * y.nbytes + 4 * 8 * T + 64 * 64 * 8 * 40
    assert state.levels_BLHKV.shape[1] == T.bit_length()
    t = T - 1
    place = torch.arange(T)
    index = torch.tensor([0 if s == t else (t ^ s).bit_length() for s in place.tolist()])
    total = gate.double().cumsum(1)
    fade = (total[0, t] - total[0]).exp() * weights[0, t].double()[:, index].T
    wanted = torch.einsum("hk,shk,sh,shv->hv", q[0, t].double(), k[0].double(), fade, v[0].double())
    assert_close(y[0, t], wanted, 1e-5)
