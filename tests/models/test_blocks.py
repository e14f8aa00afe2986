"""A block: the residual stream around any mixer."""

from __future__ import annotations

import pytest
import torch

from latte.mixers import names
from latte.models.blocks import Block
from latte.models.config import LatteConfig


@pytest.mark.parametrize("block", ["++", "plain"])
@pytest.mark.parametrize("mixer", names())
def test_adding_in_place_is_seen_by_nobody(mixer, block):
    torch.manual_seed(0)
    config = LatteConfig(
        block=block, mixer=mixer, hidden_size=8, num_attention_heads=2, intermediate_size=16, initializer_range=0.5
    )
    layer, x = Block(config, 0).double(), torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    weights = list(layer.parameters())

    before = x.detach().clone()
    y, _ = layer(x, None, None, None)
    gradients = torch.autograd.grad(y, [x, *weights], dy)
    assert torch.equal(x, before)

    watched = {}
    layer.mixer.register_forward_hook(lambda module, inputs, output: watched.update(mixer=output[0]))
    layer.mlp.register_forward_hook(lambda module, inputs, output: watched.update(mlp=output))
    y_watched, _ = layer(x, None, None, None)
    torch.testing.assert_close(y_watched, x + watched["mixer"] + watched["mlp"], rtol=0, atol=1e-12)
    torch.testing.assert_close(y, y_watched, rtol=0, atol=1e-12)
    for found, wanted in zip(gradients, torch.autograd.grad(y_watched, [x, *weights], dy), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
