"""Causal Latte's kernel against the recurrence, token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from latte.ops import native
from latte.ops.native.latte import EMPTY
from tests.ops.native.support import latte, needs_library, relative, spread

pytestmark = needs_library


def inputs(
    seed: int,
    B: int,
    T: int,
    H: int,
    M: int,
    V: int,
    *,
    carry: bool,
    masks: bool,
    dtype: torch.dtype,
    size: float = 1.0,
):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    p, k, v = normal(B, T, H, M).softmax(-1), size * normal(B, T, H, M), normal(B, T, H, V)
    a = size * normal(B, H, M) if carry else torch.full((B, H, M), EMPTY, dtype=torch.float64)
    S = normal(B, H, M, V) if carry else torch.zeros(B, H, M, V, dtype=torch.float64)
    mask = torch.rand(B, T, generator=g) < 0.7 if masks else None
    reset = torch.rand(B, T, generator=g) < 0.1 if masks else None
    return [p.to(dtype), k.to(dtype), v.to(dtype), a, S.to(dtype), mask, reset]


def double(args: list) -> list:
    return [x.double() if x is not None and x.is_floating_point() else x for x in args]


def gradients(function, args: list, seed: int = 0) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    leaves = [x.detach().clone().requires_grad_() for x in args[:5]]
    out = function(*leaves, *args[5:])
    g = torch.Generator().manual_seed(seed)
    loss = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)).sum() for x in out)
    return tuple(x.detach() for x in out), torch.autograd.grad(loss, leaves)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    T=st.sampled_from([1, 2, 7, 31, 32, 33, 70]),
    H=st.integers(1, 3),
    M=st.sampled_from([1, 3, 5, 7, 8, 33]),
    V=st.sampled_from([1, 3, 5, 7, 16, 33]),
    carry=st.booleans(),
    masks=st.booleans(),
    size=st.sampled_from([1.0, 30.0, 1e4]),
    strided=st.booleans(),
)
def test_outputs_and_gradients_follow_the_recurrence(T, H, M, V, carry, masks, size, strided):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 2e-5)):
        args = inputs(T * M + V, 2, T, H, M, V, carry=carry, masks=masks, dtype=dtype, size=size)
        expected, expected_grads = gradients(latte, double(args))
        if strided:
            args[:3] = [spread(x) for x in args[:3]]
        got, got_grads = gradients(native.causal_latte, args)
        for name, x, y in zip(("y", "log_norm", "mean"), got, expected, strict=True):
            assert relative(x, y) < tolerance, name
        for name, x, y in zip(("p", "k", "v", "log_norm0", "mean0"), got_grads, expected_grads, strict=True):
            assert relative(x, y) < tolerance, name


@pytest.mark.parametrize("T", [1, 5])
def test_gradcheck(T):
    args = inputs(1, 2, T, 2, 3, 2, carry=True, masks=T > 1, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in args[:5]]
    torch.autograd.gradcheck(lambda *x: torch.ops.latte.causal_latte(*x, *args[5:]), leaves)


def test_the_future_changes_no_bit():
    args = inputs(2, 1, 80, 2, 5, 7, carry=True, masks=False, dtype=torch.float32)
    y = native.causal_latte(*args)[0]
    for cut in (1, 17, 32, 50):
        other = [x.clone() for x in args[:3]]
        for x in other:
            x[:, cut:] = 1e4 * torch.randn_like(x[:, cut:])
        assert torch.equal(native.causal_latte(*other, *args[3:])[0][:, :cut], y[:, :cut])
        assert relative(native.causal_latte(*(x[:, :cut] for x in args[:3]), *args[3:])[0], y[:, :cut]) < 1e-6


@pytest.mark.parametrize("at", [39, 40, 41, 42, 43])
def test_a_later_nan_changes_no_bit_before_it(at):
    """Also where the token before it, weighed together with it, raises the pivot."""
    p, k, v, *_ = inputs(9, 1, 64, 1, 8, 8, carry=False, masks=False, dtype=torch.float32)
    k[:, at - 1] += 100
    expected = native.causal_latte(p, k, v)[0][:, :at]
    k[:, at] = float("nan")
    assert torch.equal(native.causal_latte(p, k, v)[0][:, :at], expected)


def test_masked_tokens_are_inert_whatever_they_hold():
    args = inputs(3, 2, 40, 2, 5, 7, carry=True, masks=True, dtype=torch.float32)
    mask = args[5]
    expected, expected_grads = gradients(native.causal_latte, args)
    for x in args[:3]:
        x[~mask] = float("nan")
    got, grads = gradients(native.causal_latte, args)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(grads, expected_grads, strict=True))
    assert not got[0][~mask].any()
    assert not any(x[~mask].any() for x in grads[:3])
    nothing = torch.zeros_like(mask)
    _, a, S = native.causal_latte(*args[:5], nothing, None)
    assert torch.equal(a, args[3])
    assert torch.equal(S, args[4])


def test_documents_are_apart():
    p, k, v, *_ = inputs(4, 1, 60, 2, 5, 7, carry=False, masks=False, dtype=torch.float64)
    reset = torch.zeros(1, 60, dtype=torch.bool)
    reset[0, [0, 13, 37]] = True
    y = native.causal_latte(p, k, v, reset=reset)[0]
    for start, end in ((0, 13), (13, 37), (37, 60)):
        alone = native.causal_latte(*(x[:, start:end] for x in (p, k, v)))[0]
        assert relative(y[:, start:end], alone) < 1e-13
    v.requires_grad_()
    native.causal_latte(p, k, v, reset=reset)[0][:, 37:].sum().backward()
    assert not v.grad[:, :37].any()


def test_split_at_any_point_carrying_the_state():
    args = inputs(5, 2, 45, 2, 5, 7, carry=True, masks=True, dtype=torch.float64)
    whole = native.causal_latte(*args)
    for cut in (1, 20, 32, 44):
        left = [x[:, :cut] if x is not None else None for x in (*args[:3], *args[5:])]
        right = [x[:, cut:] if x is not None else None for x in (*args[:3], *args[5:])]
        y0, a, S = native.causal_latte(*left[:3], args[3], args[4], *left[3:])
        y1, a, S = native.causal_latte(*right[:3], a, S, *right[3:])
        for x, y in zip((torch.cat([y0, y1], 1), a, S), whole, strict=True):
            assert relative(x, y) < 1e-12


def test_many_tokens_keep_moving_the_state():
    """In float32 the log of a long sum stops moving; the state must not."""
    T = 1 << 20
    p, k = torch.ones(1, T, 1, 1), torch.zeros(1, T, 1, 1)
    v = torch.linspace(0, 1, T).view(1, T, 1, 1)
    y, a, _ = native.causal_latte(p, k, v)
    assert abs(float(a) - torch.tensor(float(T), dtype=torch.float64).log().item()) < 1e-6
    expected = v.double().cumsum(1) / torch.arange(1, T + 1, dtype=torch.float64).view(1, T, 1, 1)
    assert relative(y, expected) < 1e-4  # the mean itself is float32


def test_an_output_written_past_the_caches_is_that_of_its_pieces():
    """From 16 MiB on rows go straight to memory; smaller pieces don't. Whole chunks carry on bit by bit."""
    T, piece, width = 9000, 3200, 59  # rows at any alignment
    args = inputs(7, 1, T, 8, 9, width, carry=True, masks=False, dtype=torch.float32)
    assert T * 8 * width * 4 >= 16 << 20 > piece * 8 * width * 4
    whole, a_end, S_end = native.causal_latte(*args[:5])
    a, S, start = args[3], args[4], 0
    while start < T:
        y, a, S = native.causal_latte(*(x[:, start : start + piece] for x in args[:3]), a, S)
        assert torch.equal(y, whole[:, start : start + piece])
        start += piece
    assert torch.equal(a, a_end)
    assert torch.equal(S, S_end)


def test_quiet_masks_change_no_bit():
    """A chunk without a masked token or a new document goes the fast way, as without any mask."""
    p, k, v, *_ = inputs(8, 1, 100, 2, 16, 8, carry=False, masks=False, dtype=torch.float32)
    seen, same = torch.ones(1, 100, dtype=torch.bool), torch.zeros(1, 100, dtype=torch.bool)
    expected = native.causal_latte(p, k, v)
    for x, y in zip(native.causal_latte(p, k, v, mask=seen, reset=same), expected, strict=True):
        assert torch.equal(x, y)
    seen[0, 70] = False  # in the third chunk: the two before it stay as they are
    assert torch.equal(native.causal_latte(p, k, v, mask=seen, reset=same)[0][:, :64], expected[0][:, :64])


def test_rising_keys_and_threads_agree():
    """A pivot that rises at every token, and heads cut along their values."""
    p, k, v, *_ = inputs(6, 1, 50, 1, 4, 64, carry=False, masks=False, dtype=torch.float32)
    k = torch.arange(50.0).view(1, 50, 1, 1).expand(1, 50, 1, 4) * 3
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(native.causal_latte(p.repeat(1, 20, 1, 1), k.repeat(1, 20, 1, 1), v.repeat(1, 20, 1, 1))[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_operator_is_well_formed_and_compiles():
    args = inputs(7, 2, 20, 2, 3, 5, carry=True, masks=True, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in args[:5]]
    torch.library.opcheck(torch.ops.latte.causal_latte, (*leaves, *args[5:]))
    compiled = torch.compile(lambda *x: native.causal_latte(*x)[0].sin(), fullgraph=True, backend="aot_eager")
    expected = native.causal_latte(*args)[0].sin()
    got = compiled(*args)
    assert torch.equal(got, expected)
    for x, y in zip(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), strict=True):
        assert torch.equal(x, y)


def test_wrong_inputs_are_named():
    p, k, v, *_ = inputs(8, 1, 4, 1, 2, 3, carry=False, masks=False, dtype=torch.float32)
    with pytest.raises(ValueError, match="k: expected shape"):
        native.causal_latte(p, k[:, :3], v)
    with pytest.raises(ValueError, match="v: expected all inputs"):
        native.causal_latte(p, k, v.double())
    with pytest.raises(ValueError, match="mask: expected bool"):
        native.causal_latte(p, k, v, mask=torch.ones(1, 4))
