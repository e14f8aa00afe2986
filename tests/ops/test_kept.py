"""The window that keeps tokens, against its rule: of all that left the window the N best, counted one by one."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latte.layers.rotary import Rotary
from latte.ops import Far, kept_attention, native, window_attention
from latte.ops.kept_selection import Events, select_blocked, select_native, select_reference
from latte.tokens import Tokens
from tests.ops.helpers import CAUSAL, assert_close, assert_states_close, flags, generator, normal
from tests.ops.test_window import places

BACKENDS = ["reference", None, *CAUSAL["kept_attention, left 0, 1 kept"].backends]
TURNING = Rotary((1.0, 0.3, 0.02))


def kept_by_the_rule(score, place, document, mask, left, sinks, kept):
    """(B, T, S, G): the tokens that each query keeps. A token is kept while fewer than N that left are better."""
    B, T, G = score.shape
    seen = torch.zeros(B, T, T, G, dtype=torch.bool)
    for b, t, g in itertools.product(range(B), range(T), range(G)):
        if not mask[b, t]:
            continue
        gone = [
            s
            for s in range(T)
            if mask[b, s] and document[b, s] == document[b, t] and sinks <= place[b, s] < place[b, t] - left
        ]
        best = sorted(gone, key=lambda s: (-float(score[b, s, g]), int(place[b, s])))[:kept]
        seen[b, t, best, g] = True
    return seen


def by_the_rule(q, k, v, s, weight, mask, reset, left, sinks, kept, softcap=None, reach=None):
    """All pairs under one softmax; distances of kept tokens at most ``reach``, each pair turned by its own."""
    heads = q.shape[2] // k.shape[2]
    place, document = places(mask, reset)
    distance = place[:, :, None] - place[:, None, :]
    same = (document[:, :, None] == document[:, None, :]) & mask[:, None, :] & mask[:, :, None]
    near = same & (distance >= 0) & (distance <= left)
    sunk = same & (distance > left) & (place < sinks)[:, None, :]
    remembered = kept_by_the_rule(s, place, document, mask, left, sinks, kept)
    k, v = (x.repeat_interleave(heads, 2) for x in (k, v))
    if reach is None:
        logits = torch.einsum("bthk,bshk->bhts", q, k)
    else:
        capped = torch.where(remembered.any(-1), distance.clamp(max=reach), distance)
        turned = torch.stack(
            [TURNING.turn_to(q, capped[:, :, i]) for i in range(q.shape[1])], dim=2
        )  # (B, T, S, H, K), as if the key stood at place 0
        logits = torch.einsum("btshk,bshk->bhts", turned, k)
    logits = logits / q.shape[-1] ** 0.5
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    kept_heads = remembered.repeat_interleave(heads, 3).permute(0, 3, 1, 2)
    bias = (weight * s).repeat_interleave(heads, 2).transpose(1, 2)[:, :, None]
    logits = torch.where(kept_heads, logits + bias, logits)
    seen = (near | sunk)[:, None] | kept_heads
    weights = torch.nan_to_num(logits.masked_fill(~seen, -torch.inf).softmax(-1))
    return torch.einsum("bhts,bshv->bthv", weights, v)


@given(
    T=st.sampled_from([1, 4, 9, 20, 67, 140]),
    left=st.sampled_from([0, 1, 2, 5]),
    sinks=st.sampled_from([0, 1, 3]),
    kept=st.sampled_from([1, 2, 5, 40]),
    softcap=st.sampled_from([None, 2.0]),
    reach=st.sampled_from([None, 6, 12]),
    ties=st.booleans(),
    masked=st.booleans(),
    documents=st.sampled_from([0.0, 0.02, 0.15]),
    cuts=st.lists(st.integers(1, 139), max_size=3),
    seed=st.integers(0, 10**6),
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_best_of_what_left_the_window_is_kept(
    backend, T, left, sinks, kept, softcap, reach, ties, masked, documents, cuts, seed
):
    """One pass, and the same row in pieces, with padding and packed documents."""
    g = generator(seed)
    q, k, v, s = (normal(g, 2, T, *shape) for shape in ((4, 6), (2, 6), (2, 3), (2,)))
    s = s.round() if ties else s
    weight = normal(g, 2)
    mask = flags(g, 2, T, 0.8) if masked else torch.ones(2, T, dtype=torch.bool)
    reset = flags(g, 2, T, documents)
    expected = by_the_rule(q, k, v, s, weight, mask, reset, left, sinks, kept, softcap, reach)
    tokens = Tokens.of(q, mask=mask, reset=reset)
    far_query = None
    if reach is not None:
        far_query = TURNING.turn_to(q, torch.full_like(tokens.place_BT, reach))
        q, k = TURNING.turn(q, tokens), TURNING.turn(k, tokens)

    def run(start, stop, state=None):
        part = slice(start, stop)
        far = None if far_query is None else Far(reach, far_query[:, part], TURNING.turn_back)
        options = {"left": left, "kept": kept, "sinks": sinks, "softcap": softcap, "weight": weight, "far": far}
        inputs = [x[:, part] for x in (q, k, v, s)]
        return kept_attention(*inputs, **options, tokens=tokens.part(start, stop), state=state, backend=backend)

    # A sink is looked at by the same query as the window here: its distance is not capped.
    assert_close(run(0, T)[0], expected)
    outputs, state = [], None
    for start, stop in itertools.pairwise(sorted({0, T, *(c for c in cuts if c < T)})):
        y, _, state = run(start, stop, state)
        outputs.append(y)
    assert_close(torch.cat(outputs, 1), expected, what="pieces")
    if T <= 20:
        outputs, state = [], None
        for t in range(T):
            y, _, state = run(t, t + 1, state)
            outputs.append(y)
        assert_close(torch.cat(outputs, 1), expected, what="steps")


@given(
    T=st.sampled_from([1, 5, 63, 64, 65, 200]),
    slots=st.sampled_from([1, 3, 30]),
    held=st.integers(0, 30),
    values=st.sampled_from([2, 1000]),
    documents=st.sampled_from([0.0, 0.01, 0.1]),
    padding=st.integers(0, 3),
    size=st.sampled_from([8, 64]),
    seed=st.integers(0, 10**6),
)
@pytest.mark.parametrize("select", [select_blocked, select_native] if native.available() else [select_blocked])
def test_blocks_of_events_give_what_events_one_by_one_give(
    select, T, slots, held, values, documents, padding, size, seed
):
    """Who is seen by which query, and who has which slot in the end."""
    g, B, G = generator(seed), 2, 2
    held = min(held, slots)
    scores = torch.randint(0, values, (B, G, slots), generator=g).double()
    order = torch.rand(B, G, slots, generator=g).argsort(-1)
    place = torch.where(torch.arange(slots) < held, order, -1)
    segment = flags(g, B, T, documents).long().cumsum(1)
    segment[:, T - min(padding, T) :] = -1
    there = flags(g, B, T, 0.8) & (segment >= 0)
    events = Events(torch.randint(0, values, (B, T, G), generator=g).double(), there, segment)
    one, many = select_reference(scores, place, events), select(scores, place, events, size)
    assert torch.equal(one.after_BGN, many.after_BGN)
    for t in range(T):
        block, query = divmod(t, size)
        for b, h in itertools.product(range(B), range(G)):
            expected = {
                int(i) for i, last in zip(one.source_BEGI[b, t, h], one.last_BEGI[b, t, h], strict=True) if last >= 0
            }
            parts = (x[b, block, h].tolist() for x in many[:3])
            seen = [i for i, first, last in zip(*parts, strict=True) if first <= query <= last]
            assert len(seen) == len(set(seen))
            assert set(seen) == expected


@given(
    T=st.sampled_from([4, 20, 70]),
    left=st.sampled_from([0, 2, 5]),
    sinks=st.sampled_from([0, 2]),
    masked=st.booleans(),
    documents=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 10**6),
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_received_in_the_window_counts(backend, T, left, sinks, masked, documents, seed):
    """Sums of the weights under the softmax of window and sinks, over all queries that see a token in the window."""
    g = generator(seed)
    q, k, v, s = (normal(g, 2, T, *shape) for shape in ((4, 6), (2, 6), (2, 3), (2,)))
    mask = flags(g, 2, T, 0.8) if masked else torch.ones(2, T, dtype=torch.bool)
    reset = flags(g, 2, T, documents)
    place, document = places(mask, reset)
    distance = place[:, :, None] - place[:, None, :]
    same = (document[:, :, None] == document[:, None, :]) & mask[:, None, :] & mask[:, :, None]
    near = same & (distance >= 0) & (distance <= left)
    seen = near | (same & (distance > left) & (place < sinks)[:, None, :])
    logits = torch.einsum("bthk,bshk->bhts", q, k.repeat_interleave(2, 2)) / 6**0.5
    weights = torch.nan_to_num(logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1)) * near[:, None]
    received = weights.sum(2).unflatten(1, (2, 2)).sum(2).transpose(1, 2)
    weight, of_received = normal(g, 2), normal(g, 2).abs()
    scores = s + of_received * received.clamp(min=1e-20).log()
    expected = by_the_rule(q, k, v, scores, weight, mask, reset, left, sinks, 3)
    tokens = Tokens.of(q, mask=mask, reset=reset)
    options = {"left": left, "kept": 3, "sinks": sinks, "weight": weight, "received": of_received}
    y, _, _ = kept_attention(q, k, v, s, **options, tokens=tokens, backend=backend)
    assert_close(y, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_that_holds_everything_keeps_nothing(backend):
    g = generator(0)
    q, k, v, s = (normal(g, 2, 12, *shape) for shape in ((4, 6), (2, 6), (2, 3), (2,)))
    y, norm, state = kept_attention(q, k, v, s, left=12, kept=3, backend=backend)
    expected, expected_norm, _ = window_attention(q, k, v, left=12, backend=backend)
    assert_close(y, expected)
    assert_close(norm, expected_norm)
    assert (state.kept_places_BNG == -1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_newcomer_takes_the_slot_of_the_worst(backend):
    """Places and slots of a row that is small enough to follow."""
    x = torch.ones(1, 8, 1, 1, dtype=torch.float64)
    s = torch.tensor([9.0, 5, 1, 7, 5, 6, 0, 0], dtype=torch.float64)[None, :, None]
    found = []
    for T in range(1, 9):
        *_, state = kept_attention(x[:, :T], x[:, :T], x[:, :T], s[:, :T], left=1, sinks=1, kept=2, backend=backend)
        found.append(state.kept_places_BNG.flatten().tolist())
    #  sink 0; 1 and 2 fill the slots; 3 (7) takes that of 2 (1); 4 (5) is no better than 1 (5); 5 (6) takes that of 1
    assert found == [[-1, -1], [-1, -1], [1, -1], [1, 2], [1, 3], [1, 3], [5, 3], [5, 3]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_of_nan_are_the_worst(backend):
    x = torch.ones(1, 6, 1, 1, dtype=torch.float64)
    s = torch.tensor([float("nan"), -torch.inf, 3.0, torch.inf, 0.0, 0.0], dtype=torch.float64)[None, :, None]
    *_, state = kept_attention(x, x, x, s, left=1, kept=2, backend=backend)
    assert state.kept_places_BNG.flatten().tolist() == [3, 2]
    assert torch.isfinite(state.kept_scores_BNG).all()


@given(T=st.sampled_from([3, 30, 70]), seed=st.integers(0, 10**6), cut=st.integers(1, 69))
def test_the_state_does_not_depend_on_the_cuts(T, seed, cut):
    op, g = CAUSAL["kept_attention, left 2, 5 kept, 1 sink, reach 6"], generator(seed)
    inputs = op.make(g, 2, T, torch.float64)
    _, whole = op.run(inputs)
    _, state = op.run([x[:, : min(cut, T - 1)] for x in inputs])
    _, state = op.run([x[:, min(cut, T - 1) :] for x in inputs], state=state)
    assert_states_close(state, whole)


@pytest.mark.parametrize("name", [name for name in CAUSAL if name.startswith("kept_attention")])
def test_token_by_token_gives_what_one_pass_gives(name):
    op, g = CAUSAL[name], generator(1)
    inputs = op.make(g, 2, 30, torch.float64)
    expected, whole = op.run(inputs, "reference")
    outputs, state = [], None
    for t in range(30):
        y, state = op.run([x[:, t : t + 1] for x in inputs], state=state)
        outputs.append(y)
    assert_close(torch.cat(outputs, 1), expected)
    assert_states_close(state, whole)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"left": 2, "kept": 0}, "kept is 0, expected a whole number of tokens, at least 1"),
        ({"left": -1, "kept": 1}, "left is -1, expected a whole number of tokens, at least 0"),
        ({"left": 2, "kept": 1, "weight": torch.ones(3, dtype=torch.float64)}, "weight has shape"),
    ],
)
def test_bad_numbers_are_refused(options, sentence):
    g = generator(0)
    q, k, v, s = (normal(g, 1, 4, *shape) for shape in ((4, 6), (2, 6), (2, 3), (2,)))
    with pytest.raises(ValueError, match=sentence):
        kept_attention(q, k, v, s, **options)


def test_a_reach_within_the_window_is_refused():
    g = generator(0)
    q, k, v, s = (normal(g, 1, 4, *shape) for shape in ((4, 6), (2, 6), (2, 3), (2,)))
    with pytest.raises(ValueError, match="reach is 2, expected more than left \\(2\\)"):
        kept_attention(q, k, v, s, left=2, kept=1, far=Far(2, q, TURNING.turn_back))
