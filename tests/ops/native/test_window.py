"""The window's kernel against full attention with a mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from latte.ops import native
from tests.ops.native.support import needs_library, relative, spread, window

pytestmark = needs_library


def inputs(seed: int, B: int, T: int, S: int, H: int, G: int, D: int, V: int, dtype: torch.dtype, segments: bool):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(shape, generator=g).to(dtype) for shape in ((B, T, H, D), (B, S, G, D), (B, S, G, V)))
    if not segments:
        return q, k, v, None, None
    ids = (torch.rand(B, S, generator=g) < 0.1).cumsum(1)
    ids[torch.rand(B, S, generator=g) < 0.15] = -1
    return q, k, v, ids[:, S - T :], ids


def gradients(function, q: Tensor, k: Tensor, v: Tensor, *rest):
    leaves = [
        x.detach().clone().requires_grad_() if x.is_contiguous() else x.detach().requires_grad_() for x in (q, k, v)
    ]
    y, lse = function(*leaves, *rest)
    g = torch.Generator().manual_seed(1)
    dy, dlse = (torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype) for x in (y, lse))
    loss = (y * dy).sum() + (lse * dlse)[lse > -1e29].sum()
    return (y.detach(), lse.detach()), torch.autograd.grad(loss, leaves)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    T=st.sampled_from([1, 2, 7, 24, 33, 130]),
    history=st.sampled_from([0, 1, 19]),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    D=st.sampled_from([1, 3, 8, 33]),
    V=st.sampled_from([1, 5, 16, 33]),
    left=st.sampled_from([0, 1, 5, 17, 40, 1000]),
    right=st.sampled_from([0, 0, 3, 40]),
    softcap=st.sampled_from([0.0, 0.0, 2.0]),
    segments=st.booleans(),
    strided=st.booleans(),
)
def test_outputs_and_gradients_follow_masked_attention(
    T, history, heads, D, V, left, right, softcap, segments, strided
):
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        q, k, v, seg_q, seg_k = inputs(T + D, 2, T, T + history, *heads, D, V, dtype, segments)
        scale = 0.7
        expected, expected_grads = gradients(
            window, *(x.double() for x in (q, k, v)), seg_q, seg_k, left, right, scale, softcap
        )
        if strided:
            q, k, v = spread(q), spread(k), spread(v)
        got, got_grads = gradients(native.window_attention, q, k, v, seg_q, seg_k, left, right, scale, softcap)
        seen = expected[1] > -1e29
        assert relative(got[0], expected[0]) < tolerance
        assert relative(got[1][seen], expected[1][seen]) < tolerance
        assert torch.equal(got[1] > -1e29, seen)
        for name, x, y in zip("qkv", got_grads, expected_grads, strict=True):
            assert relative(x, y) < tolerance, name


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_gradcheck(softcap):
    q, k, v, seg_q, seg_k = inputs(1, 1, 5, 7, 2, 1, 2, 3, torch.float64, True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seg_q, seg_k = seg_q.int(), seg_k.int()
    torch.autograd.gradcheck(lambda *x: torch.ops.latte.window_attention(*x, seg_q, seg_k, 3, 1, 0.5, softcap), leaves)


def test_the_future_changes_no_bit():
    q, k, v, *_ = inputs(2, 1, 100, 100, 2, 1, 8, 8, torch.float32, False)
    y, lse = native.window_attention(q, k, v, None, None, 20)
    for cut in (1, 24, 50, 77):
        other = [x.clone() for x in (q, k, v)]
        for x in other:
            x[:, cut:] = 100 * torch.randn_like(x[:, cut:])
        y2, lse2 = native.window_attention(*other, None, None, 20)
        assert torch.equal(y2[:, :cut], y[:, :cut])
        assert torch.equal(lse2[:, :cut], lse[:, :cut])


def test_history_is_the_same_as_a_longer_prefix():
    q, k, v, *_ = inputs(3, 2, 60, 60, 2, 2, 7, 5, torch.float64, False)
    y, lse = native.window_attention(q, k, v, None, None, 9)
    for cut in (1, 30, 59):
        y2, lse2 = native.window_attention(q[:, cut:], k[:, max(0, cut - 9) :], v[:, max(0, cut - 9) :], None, None, 9)
        assert relative(y2, y[:, cut:]) < 1e-13
        assert relative(lse2, lse[:, cut:]) < 1e-13


def test_invalid_positions_are_inert_whatever_they_hold():
    q, k, v, seg_q, seg_k = inputs(4, 2, 50, 60, 2, 1, 7, 5, torch.float32, True)
    expected, expected_grads = gradients(native.window_attention, q, k, v, seg_q, seg_k, 12, 3)
    q[seg_q < 0], k[seg_k < 0], v[seg_k < 0] = float("nan"), float("nan"), float("nan")
    got, grads = gradients(native.window_attention, q, k, v, seg_q, seg_k, 12, 3)
    for x, y in zip((*got, *grads), (*expected, *expected_grads), strict=True):
        assert torch.equal(x, y)
    assert not got[0][seg_q < 0].any()
    assert not grads[0][seg_q < 0].any()
    assert not grads[1][seg_k < 0].any()
    assert not grads[2][seg_k < 0].any()


def test_large_scores_are_finite():
    q, k, v, *_ = inputs(5, 1, 40, 40, 1, 1, 8, 8, torch.float32, False)
    got, grads = gradients(native.window_attention, 1e3 * q, 1e3 * k, v, None, None, 10)
    assert all(x.isfinite().all() for x in (*got, *grads))


def test_operator_is_well_formed_and_compiles():
    q, k, v, seg_q, seg_k = inputs(6, 2, 30, 33, 4, 2, 5, 3, torch.float32, True)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.latte.window_attention, (*leaves, seg_q.int(), seg_k.int(), 7, 2, 0.5, 3.0))

    def function(*x: Tensor) -> Tensor:
        y, lse = native.window_attention(*x, seg_q, seg_k, 7, 2, 0.5, 3.0)
        return y.sin().sum() + lse.tanh().sum()

    got, expected = torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves), function(*leaves)
    assert torch.equal(got, expected)
    for x, y in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert torch.equal(x, y)


def test_wrong_inputs_are_named():
    q, k, v, *_ = inputs(7, 1, 4, 4, 2, 2, 3, 3, torch.float32, False)
    with pytest.raises(ValueError, match="heads a multiple"):
        native.window_attention(q, torch.cat([k, k], 2)[:, :, :3], torch.cat([v, v], 2)[:, :, :3], None, None, 2)
    with pytest.raises(ValueError, match="left and right"):
        native.window_attention(q, k, v, None, None, -1)
    with pytest.raises(ValueError, match="both seg_q and seg_k"):
        native.window_attention(q, k, v, torch.zeros(1, 4, dtype=torch.int64), None, 1)
