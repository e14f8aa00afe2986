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


def test_what_a_hook_on_the_last_projection_kept_stays_as_it_was():
    torch.manual_seed(0)
    layer, x = Block(LatteConfig(hidden_size=8, num_attention_heads=2, intermediate_size=16), 0), torch.randn(1, 5, 8)
    kept = []

    def keep(module, inputs, output):
        if isinstance(output, torch.Tensor) and module in (layer.mixer.o_proj, layer.mlp.down_proj):
            kept.append((output, output.detach().clone()))

    own = [part.register_forward_hook(keep) for part in (layer.mixer.o_proj, layer.mlp.down_proj)]
    layer(x, None, None, None)
    for handle in own:
        handle.remove()
    everywhere = torch.nn.modules.module.register_module_forward_hook(keep)
    layer(x, None, None, None)
    everywhere.remove()
    assert len(kept) == 4
    assert all(torch.equal(output, then) for output, then in kept)


@pytest.mark.parametrize("mixer", names())
def test_a_long_row_is_read_in_pieces_like_a_short_one(mixer, monkeypatch):
    monkeypatch.setattr(Block, "TOKENS_AT_ONCE", 4)
    torch.manual_seed(0)
    config = LatteConfig(mixer=mixer, hidden_size=8, num_attention_heads=2, intermediate_size=16, initializer_range=0.5)
    layer, x = Block(config, 0).double(), torch.randn(2, 11, 8, dtype=torch.float64)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, :5] = mask[1, 9:] = False
    reset = torch.zeros(2, 11, dtype=torch.bool)
    reset[:, 6] = True
    calls = []
    layer.mixer.register_forward_hook(lambda module, inputs, output: calls.append(inputs[0].shape[1]))
    whole, after = layer(x, None, mask, reset)
    with torch.no_grad():
        pieces, after_pieces = layer(x, None, mask, reset)
    in_pieces = layer.mixer.constant_state
    assert calls == ([11, 4, 4, 3] if in_pieces else [11, 11])
    torch.testing.assert_close(pieces[mask], whole[mask], rtol=0, atol=1e-10)
    if in_pieces:
        continued = torch.randn(2, 3, 8, dtype=torch.float64)
        torch.testing.assert_close(
            layer(continued, after_pieces, None, None)[0], layer(continued, after, None, None)[0]
        )
