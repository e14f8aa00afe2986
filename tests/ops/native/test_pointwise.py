"""RG-LRU, rotary encoding, SwiGLU and RMS norm: the kernels against the same thing in torch, in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from latte.ops import native
from tests.ops.native.support import needs_library, relative

pytestmark = needs_library


def rglru(gates, x, bias, rate, h0, count0, mask, reset):
    """The recurrence token by token."""
    B, T = x.shape[:2]
    r, i = torch.sigmoid(gates + bias[:, None, None])
    log_a = -rate * r
    m = (-torch.expm1(2 * log_a)).sqrt()
    rows, lasts, counts = [], [], []
    for b in range(B):
        h, count, outs = h0[b].reshape(x.shape[2:]), int(count0[b]), []
        for t in range(T):
            if reset is not None and reset[b, t]:
                h, count = torch.zeros_like(h), 0
            if mask is not None and not mask[b, t]:
                outs.append(torch.zeros_like(h))
                continue
            scale = torch.ones_like(h) if count == 0 else m[b, t]
            h = log_a[b, t].exp() * h + scale * (i[b, t] * x[b, t])
            count += 1
            outs.append(h)
        rows.append(torch.stack(outs))
        lasts.append(h.flatten())
        counts.append(count)
    return torch.stack(rows), torch.stack(lasts), torch.tensor(counts)


def inputs(seed, B, T, H, W, dtype, masks):
    g = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=g).to(dtype)  # noqa: E731
    count0 = torch.randint(0, 3, (B,), generator=g)
    h0 = draw(B, H * W) * (count0 > 0)[:, None]
    mask = torch.rand(B, T, generator=g) < 0.7 if masks else None
    reset = torch.rand(B, T, generator=g) < 0.15 if masks else None
    rate = 0.05 + torch.rand(H, W, generator=g).to(dtype)
    return [draw(2, B, T, H, W), draw(B, T, H, W), draw(2, H, W), rate, h0], (count0, mask, reset)


def gradients(function, tensors, rest):
    leaves = [x.detach().requires_grad_() for x in tensors]
    y, h1, count = function(*leaves, *rest)
    g = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)).sum() for x in (y, h1))
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return (y.detach(), h1.detach()), count, grads


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    T=st.sampled_from([1, 2, 7, 33, 300]),
    shape=st.sampled_from([(1, 1), (3, 5), (2, 8), (4, 12), (1, 33)]),
    masks=st.booleans(),
    strided=st.booleans(),
)
def test_rglru_follows_the_recurrence(T, shape, masks, strided):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        tensors, rest = inputs(T + shape[1], 2, T, *shape, dtype, masks)
        expected, expected_count, expected_grads = gradients(rglru, [x.double() for x in tensors], rest)
        if strided:
            tensors[0] = tensors[0].permute(3, 1, 2, 0, 4).contiguous().permute(3, 1, 2, 0, 4)
            tensors[1] = tensors[1].transpose(0, 1).contiguous().transpose(0, 1)
        got, count, grads = gradients(native.rglru, tensors, rest)
        assert torch.equal(count, expected_count)
        for x, y in zip((*got, *grads), (*expected, *expected_grads), strict=True):
            assert relative(x, y) < tolerance


def test_rglru_is_exact_near_one_and_finite_far_away():
    """1 - a^2 keeps its digits for tiny rates, and gates of 1e4 make no NaN, forwards or backwards."""
    T, W = 50, 16
    x = torch.randn(1, T, 1, W)
    for rate, gate in ((1e-7, 0.0), (1e-4, 3.0), (8.0, 1e4), (8.0, -1e4), (0.0, 1.0)):
        tensors = [torch.full((2, 1, T, 1, W), gate), x, torch.zeros(2, 1, W), torch.full((1, W), rate)]
        tensors.append(torch.zeros(1, W))
        rest = (torch.zeros(1, dtype=torch.long), None, None)
        got, _, grads = gradients(native.rglru, tensors, rest)
        expected = rglru(*(t.double() for t in tensors), *rest)[0]
        assert relative(got[0], expected) < 1e-5
        assert all(torch.isfinite(g).all() for g in grads)


def test_rglru_bounds_the_derivative_of_the_root():
    """At a = 1 the derivative of sqrt(1 - a^2) is taken as 1000, not infinity."""
    x = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    rate = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    gates, bias = torch.zeros(2, 1, 2, 1, 1, dtype=torch.float64), torch.zeros(2, 1, 1, dtype=torch.float64)
    h0, count0 = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    y, _, _ = native.rglru(gates, x, bias, rate, h0, count0)
    (drate,) = torch.autograd.grad(y[0, 1].sum(), rate)
    # h_2 = a h_1 + m i x with h_1 = i = 1/2, r = 1/2: d/d rate = -r h_1 + 1000 * 2 r i
    assert float(drate) == pytest.approx(-0.25 + 500.0)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from([(1, 1, 1, 2), (2, 7, 3, 6), (1, 33, 2, 16), (2, 20, 1, 66)]),
    shared=st.booleans(),
    strided=st.booleans(),
)
def test_rotation(shape, shared, strided):
    B, T, _, K = shape
    for dtype, tolerance in ((torch.float64, 1e-14), (torch.float32, 1e-6)):
        g = torch.Generator().manual_seed(T)
        x, dy = (torch.randn(shape, generator=g).to(dtype) for _ in range(2))
        angle = torch.randn(1 if shared else B, T, K // 2, generator=g).to(dtype)
        c, s = angle.cos(), angle.sin()
        if strided:
            x = torch.cat([x, x], -1)[..., :K].transpose(0, 1).contiguous().transpose(0, 1)
        x.requires_grad_()
        first, second = x.chunk(2, -1)
        cc, ss = c[:, :, None], s[:, :, None]
        expected = torch.cat([first * cc - second * ss, second * cc + first * ss], -1)
        got = native.rotate(x, c, s)
        assert relative(got.detach(), expected.detach()) < tolerance
        assert relative(torch.autograd.grad(got, x, dy)[0], torch.autograd.grad(expected, x, dy)[0]) < tolerance


@pytest.mark.parametrize("width", [2, 3, 8, 33, 512])
@pytest.mark.parametrize("rows", [1, 5, 600])
def test_swiglu_and_rms_norm(rows, width):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        g = torch.Generator().manual_seed(rows)
        x, other, dy = (3 * torch.randn(rows, width, generator=g) for _ in range(3))
        weight = torch.randn(width, generator=g)
        for kernel, torch_form, tensors in (
            (native.swiglu, lambda a, b: F.silu(a) * b, (x, other)),
            (
                lambda a, w: native.rms_norm(a, w, 1e-6),
                lambda a, w: F.rms_norm(a, w.shape, w, 1e-6),
                (x, weight),
            ),
        ):
            got_in = [t.to(dtype).requires_grad_() for t in tensors]
            exact_in = [t.double().requires_grad_() for t in tensors]
            got, exact = kernel(*got_in), torch_form(*exact_in)
            grads = torch.autograd.grad(got, got_in, dy.to(dtype))
            exact_grads = torch.autograd.grad(exact, exact_in, dy.double())
            for a, b in zip((got, *grads), (exact, *exact_grads), strict=True):
                assert relative(a.detach(), b.detach()) < tolerance


def test_swiglu_of_large_gates():
    gate = torch.tensor([-1e4, -100.0, -88.0, 0.0, 88.0, 1e4])
    torch.testing.assert_close(native.swiglu(gate, torch.ones(6)), F.silu(gate))


def test_operators_are_well_formed_and_compile():
    tensors, rest = inputs(4, 2, 20, 2, 5, torch.float32, True)
    leaves = [x.requires_grad_() for x in tensors]
    torch.library.opcheck(torch.ops.latte.rglru, (*leaves, *rest))
    x, gate = torch.randn(2, 20, 3, 8, requires_grad=True), torch.randn(4, 9, requires_grad=True)
    angle = torch.randn(1, 20, 4)
    torch.library.opcheck(torch.ops.latte.rotate, (x, angle.cos(), angle.sin(), False))
    torch.library.opcheck(torch.ops.latte.swiglu, (gate, torch.randn(4, 9, requires_grad=True)))
    torch.library.opcheck(torch.ops.latte.rms_norm, (gate, torch.randn(9, requires_grad=True), 1e-5))


def test_wrong_inputs_are_named():
    x = torch.randn(1, 4, 2, 6)
    with pytest.raises(ValueError, match="cosine: expected shape"):
        native.rotate(x, torch.randn(1, 4, 2), torch.randn(1, 4, 2))
    with pytest.raises(ValueError, match="up: expected shape"):
        native.swiglu(torch.randn(3), torch.randn(4))
    with pytest.raises(ValueError, match="weight: expected shape"):
        native.rms_norm(x, torch.randn(5), 1e-6)
    tensors, rest = inputs(5, 1, 4, 2, 3, torch.float32, False)
    with pytest.raises(ValueError, match="h0: expected shape"):
        native.rglru(*tensors[:4], torch.zeros(1, 5), *rest)
