"""The complex scan against a loop over torch's complex numbers, document by document."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latte.ops import ComplexState, complex_scan
from latte.ops.complex_scan import BLOCK
from latte.tokens import Tokens
from tests.ops.helpers import CAUSAL, assert_close, flags, generator, normal

BACKENDS = ["reference", None, *CAUSAL["complex_scan"].backends]
P = 3


def inputs(g, T, constant, strength=0.3):
    """b, log_r and theta; what is constant has no axes B and T."""
    lead = () if constant else (2, T)
    return normal(g, 2, T, P, 2), -strength * normal(g, *lead, P).abs(), 4 * normal(g, *lead, P)


def loop(b, log_r, theta, mask, reset, h, reverse):
    """Row by row and token by token in complex128: outputs and the last value."""
    b, a = torch.view_as_complex(b), torch.exp(torch.complex(log_r, theta)).expand(b.shape[:3])
    T, y, ends = b.shape[1], torch.zeros_like(b), []
    for row in range(len(b)):
        last = h[row]
        for t in range(T - 1, -1, -1) if reverse else range(T):
            # A document begins at its reset; from right to left, the token before a reset begins one.
            begins = reset[row, t] if not reverse else t + 1 < T and reset[row, t + 1]
            last = torch.zeros_like(last) if begins else last
            if mask[row, t]:
                last = y[row, t] = a[row, t] * last + b[row, t]
        ends.append(last)
    return torch.view_as_real(y), torch.view_as_real(torch.stack(ends))


@given(T=st.sampled_from([1, 2, 17, 64, 67, 2 * BLOCK + 3]), seed=st.integers(0, 10**6), constant=st.booleans())
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scan_is_the_complex_recurrence(backend, reverse, T, seed, constant):
    g = generator(seed)
    b, log_r, theta = inputs(g, T, constant)
    mask, reset, h = flags(g, 2, T, 0.8), flags(g, 2, T, 0.1), normal(g, 2, P, 2)
    if T > BLOCK:  # documents that begin with a block, from either side
        reset[:, [BLOCK, T - BLOCK]] = True
    tokens = Tokens.of(b, mask=mask, reset=reset, continues=True)
    got, after = complex_scan(b, log_r, theta, reverse=reverse, state=ComplexState(h), tokens=tokens, backend=backend)
    expected, end = loop(b, log_r, theta, mask, reset, torch.view_as_complex(h), reverse)
    assert_close(got, expected)
    assert_close(after.h_BPZ, end, what="state")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_gradient_passes_a_boundary(backend, reverse):
    """Not to gates and angles either, though angles are sums over tokens."""
    T, g = 70, generator(0)
    tensors = [x.requires_grad_() for x in inputs(g, T, constant=False)]
    reset = torch.zeros(2, T, dtype=torch.bool)
    reset[:, [20, 41]] = True
    tokens = Tokens.of(tensors[0], mask=flags(g, 2, T, 0.8), reset=reset)
    y, _ = complex_scan(*tensors, reverse=reverse, tokens=tokens, backend=backend)
    for span in (slice(0, 20), slice(20, 41), slice(41, T)):
        for gradient in torch.autograd.grad(y[:, span].square().sum(), tensors, retain_graph=True):
            assert (gradient[:, : span.start] == 0).all()
            assert (gradient[:, span.stop :] == 0).all()
            assert (gradient[:, span] != 0).any()


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_row_in_float32_is_that_in_float64(backend, constant):
    """4096 tokens that hardly fade and turn a radian each: values, and gradients to gates and angles."""
    T, g = 4096, generator(0)
    b, log_r, theta = (x.float() for x in inputs(g, T, constant, strength=1e-3))
    direction, results = normal(g, 2, T, P, 2), []
    for dtype, form in ((torch.float64, "torch"), (torch.float32, backend)):
        tensors = [x.to(dtype).requires_grad_() for x in (b, log_r, theta)]
        y, after = complex_scan(*tensors, backend=form)
        results.append([y, after.h_BPZ, *torch.autograd.grad((y * direction.to(dtype)).sum(), tensors)])
    for name, expected, got in zip(("h", "state", "b", "log_r", "theta"), *results, strict=True):
        assert_close(got, expected, 1e-5, what=name)


def test_what_does_not_fit_is_refused():
    b, gate = torch.zeros(2, 5, P, 2), torch.zeros(P)
    for tensors, message in (
        ((b[..., :1], gate, gate), r"b has shape \(2, 5, 3, 1\), expected \(B, T, P, 2\)"),
        ((b, gate[None], gate), r"log_r has shape \(1, 3\), expected \(P,\) or \(B, T, P\)"),
        ((b, gate, torch.zeros(2, 4, P)), r"theta has shape \(2, 4, 3\), expected \(B=2, T=5, P=3\)"),
        ((b, gate.half(), gate), "log_r is torch.float16, but b is torch.float32"),
        ((b, gate, gate.long()), "theta has dtype torch.int64, expected a floating-point dtype"),
    ):
        with pytest.raises(ValueError, match=f"complex_scan: {message}"):
            complex_scan(*tensors)
    with pytest.raises(ValueError, match=r"state.h_BPZ has shape \(2, 4, 2\), expected \(2, 3, 2\)"):
        complex_scan(b, gate, gate, state=ComplexState(torch.zeros(2, 4, 2)))
