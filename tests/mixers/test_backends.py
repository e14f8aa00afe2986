"""A layer is the same function whatever serves its parts: native kernels, torch or the references."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from latte.layers.linear import RMSNorm, TokenLinear
from latte.layers.mlp import SwiGLU
from latte.layers.rotary import rotary
from latte.mixers import MixerConfig, build
from latte.models import preset
from latte.models.blocks import Block
from latte.ops import native, product, window_attention
from latte.ops.pointwise import rms_norm, rotate_pairs, swiglu
from latte.tokens import Tokens
from tests.ops.helpers import assert_close

MACCHIATO = {"feed": "rglru", "window": 7, "num_latents": 12}


def outcome(mixer: torch.nn.Module, x: torch.Tensor, **flags: torch.Tensor) -> list[torch.Tensor]:
    """Output, state, and all gradients, parameters' too."""
    x = x.detach().requires_grad_()
    y, state = mixer(x, tokens=Tokens.of(x, **flags))
    leaves = [x, *mixer.parameters()]
    grads = torch.autograd.grad((y * y.detach().cos()).sum(), leaves)
    return [y.detach(), *(t.detach().double() for _, t in state.tensors()), *grads]


@pytest.mark.parametrize("flags", ["plain", "padded", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_macchiato_layer_is_the_same_on_every_backend(flags, dtype, monkeypatch):
    torch.manual_seed(0)
    mixer = build("latte", MixerConfig(hidden_size=24, num_heads=3, options=MACCHIATO)).to(dtype)
    x = torch.randn(2, 37, 24, dtype=dtype)
    given = {}
    if flags != "plain":
        given["mask"] = torch.rand(2, 37) < 0.8
    if flags == "packed":
        given["reset"] = torch.rand(2, 37) < 0.1
    results = {}
    for backend in ("reference", "torch", "native"):
        monkeypatch.setenv("LATTE_BACKEND", backend)
        results[backend] = outcome(mixer, x, **given)
    for backend in ("torch", "native"):
        for got, expected in zip(results[backend], results["reference"], strict=True):
            if got.numel():
                assert_close(got, expected, 2e-5 if dtype == torch.float32 else 1e-10, what=backend)


@pytest.mark.parametrize("T", [1, 5, 6, 7, 20])
@pytest.mark.parametrize("left", [0, 1, 6])
def test_the_short_way_through_the_window_leaves_the_same_state(T, left):
    q, k, v = (torch.randn(2, T, 2, 4, dtype=torch.float64) for _ in range(3))
    y, _, state = window_attention(q, k, v, left=left)
    expected, _, expected_state = window_attention(q, k, v, left=left, backend="torch")
    assert_close(y, expected)
    for (name, got), (_, wanted) in zip(state.tensors(), expected_state.tensors(), strict=True):
        assert torch.equal(got, wanted), name


def test_parts_between_products_are_the_same_in_torch_and_native():
    gate, up, weight = torch.randn(3, 5, 12), torch.randn(3, 5, 12), torch.randn(12)
    assert_close(swiglu(gate, up), F.silu(gate) * up)
    assert_close(swiglu(gate, up, backend="torch"), F.silu(gate) * up)
    for backend in (None, "torch"):
        assert_close(rms_norm(gate, weight, 1e-6, backend=backend), F.rms_norm(gate, (12,), weight, 1e-6))
    norm = RMSNorm(12).bfloat16()
    assert norm(gate.bfloat16()).dtype == torch.bfloat16
    x, angle = torch.randn(2, 5, 3, 8), torch.randn(1, 5, 4)
    assert_close(rotate_pairs(x, angle.cos(), angle.sin()), rotate_pairs(x, angle.cos(), angle.sin(), backend="torch"))
    turning = rotary(8, 1e4)
    assert_close(turning.turn(x, Tokens.of(x)), turning.turn_to(x, torch.arange(5).expand(2, 5)))


def test_a_long_row_passes_the_mlp_in_parts(monkeypatch):
    monkeypatch.setattr(SwiGLU, "TOKENS_AT_ONCE", 4)
    block = Block(preset("transformer++", "tiny"), 0)
    x = torch.randn(2, 11, 128)
    whole = block.mlp(x)
    with torch.no_grad():
        assert_close(block.mlp(x), whole)
        assert block.mlp(x[0]).shape == (11, 128)


@pytest.mark.skipif(not native.available(), reason=native.describe())
@pytest.mark.parametrize("bias", [False, True])
def test_a_pretrained_projection_keeps_its_results_whatever_serves(bias, monkeypatch):
    monkeypatch.setattr(product, "LARGE", 1)
    calls, products = [], native.products
    monkeypatch.setattr(native, "products", lambda *given: calls.append(given[0].shape) or products(*given))
    layer = nn.Sequential(nn.Linear(12, 7, bias=bias))
    names = set(layer.state_dict())
    inputs = [torch.randn(shape) for shape in ((1, 1, 12), (4, 1, 12), (5, 1, 12), (2, 3, 12), (3, 12))]
    wanted = [layer(x) for x in inputs]
    TokenLinear.take_over(layer)
    assert isinstance(layer[0], TokenLinear)
    assert set(layer.state_dict()) == names
    for x, y in zip(inputs, wanted, strict=True):
        assert_close(layer(x), y)
        with torch.no_grad():
            assert_close(layer(x), y)
    assert calls == [(1, 12), (4, 12)]
    monkeypatch.setenv("LATTE_BACKEND", "torch")
    with torch.no_grad():
        assert_close(layer(inputs[0]), wanted[0])
    assert len(calls) == 2
