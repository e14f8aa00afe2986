"""A block: residual sublayers around any mixer."""

from __future__ import annotations

import pytest
import torch

from latte.mixers import mixer_class, names
from latte.models.blocks import Block
from latte.models.config import LatteConfig
from latte.tokens import Tokens

CAUSAL = [name for name in names() if "causal" in mixer_class(name).directions]


def small(mixer: str, **fields) -> LatteConfig:
    """A configuration of the mixer's first causal example."""
    example = next(dict(entry) for entry in mixer_class(mixer).examples if not entry.get("bidirectional"))
    for key in ("num_key_value_heads", "head_dim", "norm_eps"):
        example.pop(key, None)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16, "initializer_range": 0.5}
    return LatteConfig(mixer=mixer, mixer_options=example, **{**sizes, **fields})


@pytest.mark.parametrize("block", ["++", "plain"])
@pytest.mark.parametrize("mixer", CAUSAL)
def test_a_block_adds_what_its_sublayers_give(mixer, block):
    torch.manual_seed(0)
    layer, x = Block(small(mixer, block=block), 0).double(), torch.randn(2, 9, 8, dtype=torch.float64)
    given = []
    for part in (layer.mixer, layer.mlp):
        part.register_forward_hook(
            lambda module, inputs, output: given.append(output[0] if isinstance(output, tuple) else output)
        )
    y, states, _ = layer(x, None, Tokens.of(x))
    assert torch.equal(y, x + given[0] + given[1])
    assert len(states) == 1


def test_a_block_may_have_any_sublayers():
    """Two mixers, no MLP: each has a norm and a state of its own, and the names say which is which."""
    config = small("gla", pattern=[["mixer", {"mixer": "linear", "options": {"floor": 0.1}}], ["softmax", "mlp"]])
    first, second = Block(config, 0), Block(config, 1)
    assert first.roles == ["mixer", "mixer_2"]
    assert [type(mixer).__name__ for mixer in first.mixers] == ["GLAMixer", "LinearMixer"]
    assert first.mixer_2.options.floor == 0.1
    assert second.roles == ["mixer", "mlp"]
    assert Block(config, 2).roles == first.roles  # the pattern repeats
    x = torch.randn(1, 5, 8)
    y, states, _ = first(x, None, Tokens.of(x))
    mixed = x + first.mixer(first.mixer_norm(x))[0]
    torch.testing.assert_close(y, mixed + first.mixer_2(first.mixer_2_norm(mixed))[0])
    assert [type(state).__name__ for state in states] == ["DecayState", "DecayState"]
    more = torch.randn(1, 3, 8)
    both, *_ = first(torch.cat([x, more], dim=1), None, Tokens.of(torch.cat([x, more], dim=1)))
    continued, *_ = first(more, states, Tokens.of(more, start=torch.tensor([5])))
    torch.testing.assert_close(continued, both[:, 5:])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ([], "pattern is \\[\\], expected a list of lists of sublayers"),
        (["mixer"], "expected a list of lists of sublayers"),
        ([["mixer", "mpl"]], "unknown mixer 'mpl'"),
        ([[{"options": {}}]], "expected 'mixer' and perhaps 'options'"),
        ([[{"mixer": "gla", "options": {"gate_rnak": 3}}]], "no option 'gate_rnak'.*did you mean 'gate_rank'"),
    ],
)
def test_patterns_that_make_no_sense_are_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        LatteConfig(pattern=pattern)


@pytest.mark.parametrize("mixer", CAUSAL)
def test_a_long_row_is_read_in_pieces_like_a_short_one(mixer, monkeypatch):
    monkeypatch.setattr(Block, "TOKENS_AT_ONCE", 4)
    torch.manual_seed(0)
    layer, x = Block(small(mixer), 0).double(), torch.randn(2, 11, 8, dtype=torch.float64)
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[0, :5] = mask[1, 9:] = False
    reset = torch.zeros(2, 11, dtype=torch.bool)
    reset[:, 6] = True
    calls = []
    layer.mixer.register_forward_hook(lambda module, inputs, output: calls.append(inputs[0].shape[1]))
    tokens = Tokens.of(x, mask=mask, reset=reset)
    whole, after, _ = layer(x, None, tokens)
    with torch.no_grad():
        pieces, after_pieces, _ = layer(x, None, tokens)
    in_pieces = layer.mixer.growth != "linear"
    assert calls == ([11, 4, 4, 3] if in_pieces else [11, 11])
    torch.testing.assert_close(pieces[mask], whole[mask], rtol=0, atol=1e-10)
    if in_pieces:
        continued = torch.randn(2, 3, 8, dtype=torch.float64)
        following = Tokens.of(continued, start=tokens.count_B)
        torch.testing.assert_close(layer(continued, after_pieces, following)[0], layer(continued, after, following)[0])
