"""The selective scan in many blocks, and what its gradient keeps in memory."""

import pytest
import torch

from latte.ops import selective_scan
from latte.tokens import Tokens
from tests.ops.helpers import assert_close, assert_states_close, flags, generator, normal
from tests.ops.test_long import Memory

pytestmark = pytest.mark.usefixtures("each_backend")


def inputs(B, T, D, P, dtype=torch.float64):
    g = generator(T)
    x, delta, A = normal(g, B, T, D, dtype=dtype), normal(g, B, T, D, dtype=dtype).abs(), -normal(g, D, P).abs()
    return [x, delta, A.to(dtype), normal(g, B, T, P, dtype=dtype), normal(g, B, T, P, dtype=dtype)]


def test_blocks_of_any_size_are_one_function(monkeypatch):
    """Padded and packed, with gradients to everything, A too."""
    T, g = 75, generator(0)
    tensors = [x.requires_grad_() for x in inputs(2, T, 3, 2)]
    mask, reset, direction = flags(g, 2, T, 0.8), flags(g, 2, T, 0.05), normal(g, 2, T, 3)
    y, after = selective_scan(*tensors, tokens=Tokens.of(direction, mask=mask, reset=reset), backend="reference")
    expected = torch.autograd.grad((y * direction).sum(), tensors)
    for block in (7, 16, 75, 200):
        monkeypatch.setattr("latte.ops.selective.BLOCK", block)
        found, state = selective_scan(*tensors, tokens=Tokens.of(direction, mask=mask, reset=reset))
        assert_close(found, y)
        assert_states_close(state, after)
        for mine, wanted in zip(torch.autograd.grad((found * direction).sum(), tensors), expected, strict=True):
            assert_close(mine, wanted, 1e-9)


def test_states_of_a_row_are_never_held_at_once():
    T, D, P = 2048, 16, 16
    tensors = [x.requires_grad_() for x in inputs(1, T, D, P, torch.float32)]
    with Memory(*tensors) as memory:
        y, _ = selective_scan(*tensors)
        kept = memory.live
        torch.autograd.grad(y.sum(), tensors)
    states = 4 * T * D * P
    assert kept < states / 2
    assert memory.peak < states
