"""The kernel of the delta rule against the recurrence, token by token."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from latte.ops import native
from latte.ops.delta import DeltaState, delta_attention_reference
from latte.tokens import Tokens
from tests.ops.native.support import needs_library, relative, spread

pytestmark = needs_library
#: With a write of its own (b) or without, and with which decay.
KINDS = ["tied, none", "tied, head", "tied, channel", "free, none", "free, head", "free, channel"]


def inputs(seed, B, T, H, K, V, kind, dtype, masks=False, strong=False):
    g = torch.Generator().manual_seed(seed)
    q, k, v, S0, rate = (
        torch.randn(s, generator=g, dtype=torch.float64)
        for s in ((B, T, H, K), (B, T, H, K), (B, T, H, V), (B, H, K, V), (B, T, H, K))
    )
    unit, rate = F.normalize(k, dim=-1), rate.sigmoid()
    log_decay = None
    if "none" not in kind:
        shape = (B, T, H, K) if "channel" in kind else (B, T, H)
        log_decay = -torch.rand(shape, generator=g, dtype=torch.float64) * (300 if strong else 0.3)
    tied = kind.startswith("tied")
    a, b, k = (unit, None, rate[..., :1] * unit) if tied else (-unit, rate * unit, k)
    mask = torch.rand(B, T, generator=g) < 0.7 if masks else None
    reset = torch.rand(B, T, generator=g) < 0.1 if masks else None
    return [*(None if x is None else x.to(dtype) for x in (q, k, v, a, b, log_decay, S0)), mask, reset]


def reference(q, k, v, a, b, log_decay, S0, mask=None, reset=None):
    tokens = Tokens(q.shape[0], q.shape[1], q.device, mask, reset, continues=True)
    y, state = delta_attention_reference(q, k, v, a, b, log_decay, DeltaState(S0), tokens)
    return y, state.map_BHKV


def gradients(function, args):
    leaves = [None if x is None else x.detach().requires_grad_() for x in args[:7]]
    out = function(*leaves, *args[7:])
    g = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)).sum() for x in out)
    return tuple(x.detach() for x in out), torch.autograd.grad(loss, [x for x in leaves if x is not None])


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    T=st.sampled_from([1, 2, 7, 33, 70]),
    H=st.integers(1, 3),
    K=st.sampled_from([1, 3, 5, 8, 33]),
    V=st.sampled_from([1, 3, 7, 16, 33, 80]),
    kind=st.sampled_from(KINDS),
    masks=st.booleans(),
    strong=st.booleans(),
    strided=st.booleans(),
)
def test_outputs_and_gradients_follow_the_recurrence(T, H, K, V, kind, masks, strong, strided):
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        args = inputs(T + K + V, 2, T, H, K, V, kind, dtype, masks, strong)
        doubles = [x.double() if x is not None and x.is_floating_point() else x for x in args]
        expected, expected_grads = gradients(reference, doubles)
        if strided:
            args[:5] = [None if x is None else spread(x) for x in args[:5]]
        got, grads = gradients(native.delta_attention, args)
        for x, y in zip((*got, *grads), (*expected, *expected_grads), strict=True):
            # Where decay leaves nothing, its gradient is a difference of equal numbers: compare on the scale of those.
            scale = max(float(y.abs().max()), float(expected_grads[0].abs().max()) if strong else 0.0, 1e-3)
            assert float((x.double() - y).abs().max()) < tolerance * scale


def test_long_gate_gradients_do_not_drift():
    """Cumulative sums of rounded numbers drift; anchored at kept states they must not."""
    for kind in ("tied, channel", "free, channel"):
        args = inputs(2, 1, 1500, 1, 4, 4, kind, torch.float32)
        doubles = [x.double() if x is not None else x for x in args]
        _, grads = gradients(native.delta_attention, args)
        _, expected = gradients(native.delta_attention, doubles)
        for x, y in zip(grads, expected, strict=True):
            assert relative(x, y) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_masked_tokens_are_inert_whatever_they_hold(kind):
    args = inputs(3, 2, 40, 2, 5, 7, kind, torch.float32, masks=True)
    mask = args[7]
    expected, expected_grads = gradients(native.delta_attention, args)
    for x in args[:6]:
        if x is not None:
            x[~mask] = float("nan")
    got, grads = gradients(native.delta_attention, args)
    for x, y in zip((*got, *grads), (*expected, *expected_grads), strict=True):
        assert torch.equal(x, y)
    assert not got[0][~mask].any()
    assert not any(x[~mask].any() for x in grads[:-1])


def test_the_future_changes_no_bit():
    args = inputs(4, 1, 80, 2, 5, 7, "tied, channel", torch.float32)
    y = native.delta_attention(*args)[0]
    for cut in (1, 32, 50):
        other = [None if x is None else x.clone() for x in args[:6]]
        for x in other[:4]:
            x[:, cut:] = 1e4
        assert torch.equal(native.delta_attention(*other, *args[6:])[0][:, :cut], y[:, :cut])
        early, late = ([None if x is None else x[:, part] for x in args[:6]] for part in (slice(cut), slice(cut, None)))
        part, S = native.delta_attention(*early, args[6])
        assert torch.equal(torch.cat([part, native.delta_attention(*late, S)[0]], 1), y)


@pytest.mark.parametrize("kind", ["tied, none", "free, channel"])
def test_operator_is_well_formed_and_compiles(kind):
    args = inputs(5, 2, 20, 2, 3, 5, kind, torch.float32, masks=True)
    leaves = [None if x is None else x.requires_grad_() for x in args[:7]]
    torch.library.opcheck(torch.ops.latte.delta_attention, (*leaves, *args[7:], True))

    def function(*x: Tensor | None) -> Tensor:
        return native.delta_attention(*x)[0].sin().sum()

    got, expected = torch.compile(function, fullgraph=True, backend="aot_eager")(*args), function(*args)
    assert torch.equal(got, expected)
