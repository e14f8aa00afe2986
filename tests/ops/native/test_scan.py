"""The diagonal scan's kernel against the recurrence, token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from latte.ops import native
from tests.ops.native.support import needs_library, relative, scan

pytestmark = needs_library


def inputs(seed: int, B: int, T: int, D: int, dtype: torch.dtype, masks: bool):
    g = torch.Generator().manual_seed(seed)
    log_a = -torch.rand(B, T, D, generator=g).to(dtype)
    log_a[torch.rand(B, T, D, generator=g) < 0.1] = -1e4
    b, h0 = torch.randn(B, T, D, generator=g).to(dtype), torch.randn(B, D, generator=g).to(dtype)
    mask = torch.rand(B, T, generator=g) < 0.7 if masks else None
    reset = torch.rand(B, T, generator=g) < 0.15 if masks else None
    return log_a, b, h0, mask, reset


def gradients(function, *args):
    leaves = [x.detach().requires_grad_() for x in args[:3]]
    h, h1 = function(*leaves, *args[3:])
    g = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)).sum() for x in (h, h1))
    return (h.detach(), h1.detach()), torch.autograd.grad(loss, leaves)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    T=st.sampled_from([1, 2, 7, 33]),
    D=st.sampled_from([1, 3, 5, 7, 8, 33, 70]),
    masks=st.booleans(),
    reverse=st.booleans(),
    strided=st.booleans(),
)
def test_outputs_and_gradients_follow_the_recurrence(T, D, masks, reverse, strided):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        log_a, b, h0, mask, reset = inputs(T + D, 3, T, D, dtype, masks)
        doubles = [x.double() for x in (log_a, b, h0)]
        expected, expected_grads = gradients(scan, *doubles, mask, reset, reverse)
        if strided:
            log_a, b = (torch.cat([x, x], -1)[..., :D].transpose(0, 1).contiguous().transpose(0, 1) for x in (log_a, b))
        got, grads = gradients(native.diagonal_scan, log_a, b, h0, mask, reset, reverse)
        for x, y in zip((*got, *grads), (*expected, *expected_grads), strict=True):
            assert relative(x, y) < tolerance


@pytest.mark.parametrize("reverse", [False, True])
def test_gradcheck(reverse):
    log_a, b, h0, mask, reset = inputs(1, 2, 5, 3, torch.float64, True)
    log_a = log_a.clamp(min=-3)
    leaves = [x.requires_grad_() for x in (log_a, b, h0)]
    torch.autograd.gradcheck(lambda *x: torch.ops.latte.diagonal_scan(*x, mask, reset, reverse), leaves)


def test_masked_tokens_are_inert_whatever_they_hold():
    log_a, b, h0, mask, reset = inputs(2, 2, 40, 9, torch.float32, True)
    expected, expected_grads = gradients(native.diagonal_scan, log_a, b, h0, mask, reset)
    log_a[~mask], b[~mask] = float("nan"), float("nan")
    got, grads = gradients(native.diagonal_scan, log_a, b, h0, mask, reset)
    for x, y in zip((*got, *grads), (*expected, *expected_grads), strict=True):
        assert torch.equal(x, y)
    assert not got[0][~mask].any()
    assert not any(x[~mask].any() for x in grads[:2])


def test_the_vector_exponential_is_exact_to_two_units():
    """With b = 0 and h0 = 1 the scan is exp(log_a)."""
    x = torch.cat(
        [torch.linspace(-87.3, 0, 40001), -torch.logspace(-8, 1, 2001), torch.tensor([-88.0, -1e30, -torch.inf])]
    )
    got = native.diagonal_scan(x.view(1, 1, -1), torch.zeros(1, 1, x.numel()), torch.ones(1, x.numel()))[0].flatten()
    exact = x.double().exp()
    unit = torch.nextafter(exact.float(), torch.tensor(2.0)).double() - exact.float().double()
    normal = x > -87.3
    assert float(((got.double() - exact).abs() / unit)[normal].max()) < 2
    assert not got[-3:].any()


def test_the_future_changes_no_bit():
    log_a, b, h0, *_ = inputs(3, 1, 40, 9, torch.float32, False)
    h = native.diagonal_scan(log_a, b, h0)[0]
    other = b.clone()
    other[:, 17:] = 1e6
    assert torch.equal(native.diagonal_scan(log_a, other, h0)[0][:, :17], h[:, :17])
    first, state = native.diagonal_scan(log_a[:, :17], b[:, :17], h0)
    assert torch.equal(torch.cat([first, native.diagonal_scan(log_a[:, 17:], b[:, 17:], state)[0]], 1), h)


def test_operator_is_well_formed_and_compiles():
    log_a, b, h0, mask, reset = inputs(4, 2, 20, 5, torch.float32, True)
    leaves = [x.requires_grad_() for x in (log_a, b, h0)]
    torch.library.opcheck(torch.ops.latte.diagonal_scan, (*leaves, mask, reset, True))

    def function(*x: Tensor) -> Tensor:
        return native.diagonal_scan(*x, mask, reset)[0].sin().sum()

    got, expected = torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves), function(*leaves)
    assert torch.equal(got, expected)
    for x, y in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert torch.equal(x, y)


def test_wrong_inputs_are_named():
    log_a, b, h0, *_ = inputs(5, 1, 4, 3, torch.float32, False)
    with pytest.raises(ValueError, match="h0: expected shape"):
        native.diagonal_scan(log_a, b, h0[:, :2])
