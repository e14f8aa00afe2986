"""The decay kernel against the recurrence, token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from latte.ops import native
from tests.ops.native.support import decay, needs_library, relative, spread

pytestmark = needs_library


def inputs(
    seed: int, B: int, T: int, H: int, K: int, V: int, kind: str, dtype: torch.dtype, masks: bool, strong: bool = False
):
    g = torch.Generator().manual_seed(seed)
    q, k, v, S0 = (
        torch.randn(s, generator=g).to(dtype) for s in ((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, H, K, V))
    )
    log_decay = None
    if kind != "none":
        log_decay = -torch.rand((B, T, H, K) if kind == "channel" else (B, T, H), generator=g).to(dtype)
        log_decay = log_decay * (300 if strong else 0.3)
    mask = torch.rand(B, T, generator=g) < 0.7 if masks else None
    reset = torch.rand(B, T, generator=g) < 0.1 if masks else None
    return [q, k, v, log_decay, S0, mask, reset]


def gradients(function, args: list):
    leaves = [None if x is None else x.detach().requires_grad_() for x in args[:5]]
    out = function(*leaves, *args[5:])
    g = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)).sum() for x in out)
    return tuple(x.detach() for x in out), torch.autograd.grad(loss, [x for x in leaves if x is not None])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    T=st.sampled_from([1, 2, 7, 33, 70]),
    H=st.integers(1, 3),
    K=st.sampled_from([1, 3, 5, 8, 33]),
    V=st.sampled_from([1, 3, 7, 16, 33]),
    kind=st.sampled_from(["none", "head", "channel"]),
    masks=st.booleans(),
    strong=st.booleans(),
    strided=st.booleans(),
)
def test_outputs_and_gradients_follow_the_recurrence(T, H, K, V, kind, masks, strong, strided):
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        args = inputs(T + K + V, 2, T, H, K, V, kind, dtype, masks, strong)
        doubles = [x.double() if x is not None and x.is_floating_point() else x for x in args]
        expected, expected_grads = gradients(decay, doubles)
        if strided:
            args[:3] = [spread(x) for x in args[:3]]
            if kind == "channel":
                args[3] = spread(args[3])
        got, grads = gradients(native.decay_attention, args)
        for x, y in zip((*got, *grads), (*expected, *expected_grads), strict=True):
            # Where decay leaves nothing, its gradient is a difference of equal numbers: compare on the scale of those.
            scale = max(float(y.abs().max()), float(expected_grads[0].abs().max()) if strong else 0.0, 1e-3)
            assert float((x.double() - y).abs().max()) < tolerance * scale


@pytest.mark.parametrize("kind", ["none", "head", "channel"])
def test_gradcheck(kind):
    args = inputs(1, 2, 5, 2, 3, 2, kind, torch.float64, True)
    leaves = [None if x is None else x.requires_grad_() for x in args[:5]]
    torch.autograd.gradcheck(lambda *x: torch.ops.latte.decay_attention(*x, *args[5:]), leaves)


def test_long_gate_gradients_do_not_drift():
    """Cumulative sums of rounded numbers drift; anchored at kept states they must not."""
    args = inputs(2, 1, 1500, 1, 4, 4, "channel", torch.float32, False)
    doubles = [x.double() if x is not None else x for x in args]
    _, grads = gradients(native.decay_attention, args)
    _, expected = gradients(native.decay_attention, doubles)
    for x, y in zip(grads, expected, strict=True):
        assert relative(x, y) < 1e-5


def test_masked_tokens_are_inert_whatever_they_hold():
    args = inputs(3, 2, 40, 2, 5, 7, "channel", torch.float32, True)
    mask = args[5]
    expected, expected_grads = gradients(native.decay_attention, args)
    for x in args[:4]:
        x[~mask] = float("nan")
    got, grads = gradients(native.decay_attention, args)
    for x, y in zip((*got, *grads), (*expected, *expected_grads), strict=True):
        assert torch.equal(x, y)
    assert not got[0][~mask].any()
    assert not any(x[~mask].any() for x in grads[:4])
    assert torch.equal(native.decay_attention(*args[:5], torch.zeros_like(mask))[1], args[4])


def test_the_future_changes_no_bit():
    args = inputs(4, 1, 80, 2, 5, 7, "head", torch.float32, False)
    y = native.decay_attention(*args)[0]
    for cut in (1, 32, 50):
        other = [x.clone() for x in args[:3]]
        for x in other:
            x[:, cut:] = 1e4
        assert torch.equal(native.decay_attention(*other, *args[3:])[0][:, :cut], y[:, :cut])
        part, S = native.decay_attention(*(x[:, :cut] for x in args[:4]), args[4])
        rest, _ = native.decay_attention(*(x[:, cut:] for x in args[:4]), S)
        assert torch.equal(torch.cat([part, rest], 1), y)


@pytest.mark.parametrize("kind", ["none", "channel"])
def test_operator_is_well_formed_and_compiles(kind):
    args = inputs(5, 2, 20, 2, 3, 5, kind, torch.float32, True)
    leaves = [None if x is None else x.requires_grad_() for x in args[:5]]
    torch.library.opcheck(torch.ops.latte.decay_attention, (*leaves, *args[5:]))

    def function(*x: Tensor | None) -> Tensor:
        return native.decay_attention(*x)[0].sin().sum()

    got, expected = torch.compile(function, fullgraph=True, backend="aot_eager")(*args), function(*args)
    assert torch.equal(got, expected)
    real = [x for x in leaves if x is not None]
    for x, y in zip(torch.autograd.grad(got, real), torch.autograd.grad(expected, real), strict=True):
        assert torch.equal(x, y)
