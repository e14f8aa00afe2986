"""The convolution's kernel against its equation, token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from latte.ops import native
from latte.ops.scan import ConvState, causal_conv_reference
from latte.tokens import Tokens
from tests.ops.native.support import needs_library, relative

pytestmark = needs_library


def inputs(seed, B, T, D, K, dtype, masks):
    g = torch.Generator().manual_seed(seed)
    x, weight, bias, tail = (
        torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
        for shape in ((B, T, D), (D, K), (D,), (B, K - 1, D))
    )
    mask = torch.rand(B, T, generator=g) < 0.7 if masks else None
    reset = torch.rand(B, T, generator=g) < 0.15 if masks else None
    return x, weight, bias, tail, mask, reset


def reference(x, weight, bias, tail, mask, reset):
    tokens = Tokens(*x.shape[:2], x.device, mask, reset, continues=True)
    y, state = causal_conv_reference(x, weight, bias, ConvState(tail), tokens)
    return y, state.tail_BKD


def gradients(function, *args):
    leaves = [x.detach().requires_grad_() for x in args[:4]]
    outputs = function(*leaves, *args[4:])
    g = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)).sum() for x in outputs)
    return [x.detach() for x in outputs], torch.autograd.grad(loss, leaves)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    T=st.sampled_from([1, 2, 7, 33, 300]),
    D=st.sampled_from([1, 3, 7, 8, 33, 70]),
    K=st.sampled_from([1, 2, 4, 5]),
    masks=st.booleans(),
    strided=st.booleans(),
)
def test_outputs_and_gradients_follow_the_equation(T, D, K, masks, strided):
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        x, weight, bias, tail, *flags = inputs(T + D + K, 3, T, D, K, dtype, masks)
        expected, expected_grads = gradients(reference, *(part.double() for part in (x, weight, bias, tail)), *flags)
        if strided:
            x = torch.cat([x, x], -1)[..., :D].transpose(0, 1).contiguous().transpose(0, 1)
        got, grads = gradients(native.causal_conv, x, weight, bias, tail, *flags)
        for found, exact in zip((*got, *grads), (*expected, *expected_grads), strict=True):
            assert relative(found, exact) < tolerance


def test_gradcheck():
    x, weight, bias, tail, mask, reset = inputs(1, 2, 5, 3, 3, torch.float64, True)
    leaves = [part.requires_grad_() for part in (x, weight, bias, tail)]
    torch.autograd.gradcheck(lambda *parts: native.causal_conv(*parts, mask, reset), leaves)


def test_threads_share_channels_without_changing_a_bit():
    args = inputs(1, 2, 200, 700, 4, torch.float32, True)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            outputs, grads = gradients(native.causal_conv, *args)
            found.append([*outputs, *grads])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, three) for one, three in zip(*found, strict=True))


def test_what_does_not_fit_is_refused():
    x, weight, bias, tail, *_ = inputs(1, 2, 5, 3, 3, torch.float32, False)
    with pytest.raises(ValueError, match="tail"):
        native.causal_conv(x, weight, bias, tail[:, :1])
    with pytest.raises(ValueError, match="float"):
        native.causal_conv(x, weight.double(), bias, tail)
