"""RWKV-6 and RWKV-7: special cases that are other mechanisms, and values that later layers get from the first."""

import pytest
import torch

from latte.layers.marks import marks_of
from latte.mixers import MixerConfig, build
from latte.mixers.rwkv7 import VALUES
from latte.models import LatteConfig, LatteModel, preset
from latte.models.blocks import Block
from latte.ops import bonus_attention, decay_attention, delta_attention
from latte.tokens import Tokens
from tests.mixers.oracle import perturbed
from tests.ops.helpers import assert_close, generator, normal

pytestmark = pytest.mark.usefixtures("each_backend")


def model(layers=3, **fields):
    config = LatteConfig(
        mixer="rwkv7",
        pattern=[["mixer", "rwkv7-channel"]],
        hidden_size=8,
        num_attention_heads=2,
        num_hidden_layers=layers,
        vocab_size=7,
        **fields,
    )
    torch.manual_seed(0)
    return perturbed(LatteModel(config).double())


def test_values_of_later_layers_are_blended_with_those_of_the_first():
    """With sigmoid(v_0) at 1 every layer reads the first one's values: its own projection is of no use."""
    net, x = model(), normal(generator(0), 2, 9, 8)
    with torch.no_grad():
        for block in net.layers[1:]:
            block.mixer.v_0.fill_(1e3)
        before = net(inputs_embeds=x).last_hidden_state
        net.layers[2].mixer.v_proj.weight.add_(1.0)
        assert torch.equal(net(inputs_embeds=x).last_hidden_state, before)
        net.layers[0].mixer.v_proj.weight.add_(1.0)
        assert not torch.allclose(net(inputs_embeds=x).last_hidden_state, before)


@pytest.mark.parametrize(("name", "gate"), [("rwkv6", "g_proj"), ("rwkv7", "gate_proj")])
def test_each_projection_reads_the_blend_of_its_own_name(name, gate):
    """nn.ParameterDict sorts its names, so taking blends by their order mixes them up."""
    config = MixerConfig(hidden_size=8, num_heads=2)
    mixer = perturbed(build(name, config).double())
    if name == "rwkv6":
        with torch.no_grad():
            mixer.mix_up.zero_()  # leaves the constant part of each mu
    x, seen = normal(generator(0), 1, 5, 8), {}
    for letter, part in {"r": "r_proj", "k": "k_proj", "v": "v_proj", "g": gate}.items():
        getattr(mixer, part).register_forward_pre_hook(
            lambda _, inputs, letter=letter: seen.setdefault(letter, inputs[0])
        )
    with torch.no_grad():
        mixer(x)
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
        for letter, blend in seen.items():
            assert_close(blend, x + (before - x) * mixer.mu[letter], 1e-12)
    assert set(seen) == set("rkvg")


def test_a_long_row_in_pieces_hands_on_the_same_values(monkeypatch):
    net, x = model(), normal(generator(0), 2, 23, 8)
    with torch.no_grad():
        whole = net(inputs_embeds=x).last_hidden_state
        monkeypatch.setattr(Block, "TOKENS_AT_ONCE", 5)
        assert_close(net(inputs_embeds=x).last_hidden_state, whole, 1e-12)
        _, _, carried = net.layers[0](x, None, Tokens.of(x))
    assert carried[VALUES].shape == (2, 23, 8)


def test_gradients_pass_through_handed_values_under_checkpointing():
    x = normal(generator(0), 2, 9, 8)
    gradients = []
    for checkpointing in (False, True):
        net = model().train()
        if checkpointing:
            net.gradient_checkpointing_enable()
        net(inputs_embeds=x, use_cache=False).last_hidden_state.square().sum().backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in net.parameters() if weight.grad is not None]))
    assert gradients[0].abs().max() > 0
    assert_close(gradients[1], gradients[0], 1e-12)


def test_without_erasing_it_is_attention_with_decay():
    g = generator(0)
    q, k, v = (normal(g, 2, 40, 2, 4) for _ in range(3))
    gate = -normal(g, 2, 40, 2, 4).abs()
    zero = torch.zeros_like(k)
    assert_close(delta_attention(q, k, v, zero, zero, gate)[0], decay_attention(q, k, v, gate)[0], 1e-12)


def test_a_bonus_of_one_after_a_decay_of_one_is_attention_without_decay():
    g = generator(0)
    q, k, v = (normal(g, 2, 40, 2, 4) for _ in range(3))
    y, _ = bonus_attention(q, k, v, torch.zeros_like(k), torch.ones(2, 4, dtype=torch.float64))
    assert_close(y, decay_attention(q, k, v)[0], 1e-12)


def test_decay_stays_above_its_floor():
    """w is in (e^{-e^{-1/2}}, 1) = (0.545, 1), whatever the input: the state after one token shows it."""
    mixer = perturbed(build("rwkv7", MixerConfig(hidden_size=8, num_heads=2)).double())
    with torch.no_grad():
        mixer.a_0.fill_(-1e3)  # nothing is erased
        mixer.w_0.fill_(1e3)
        x = normal(generator(0), 1, 2, 8)
        first = mixer(x[:, :1])[1]
        mixer.k_proj.weight.zero_()
        after = mixer(x[:, 1:], state=first)[1]
    assert_close(after.memory.map_BHKV, 0.5452392119 * first.memory.map_BHKV, 1e-8)


def test_presets_are_the_stacks_of_the_papers():
    with torch.device("meta"):
        for name, channel in (("rwkv6", "rwkv4-channel"), ("rwkv7", "rwkv7-channel")):
            net = LatteModel(preset(name, "paper-150m"))
            assert net.layers[0].mixer.config.width == 64
            assert net.layers[0].mixer_2.name == channel
            assert all(mark.decay is False for mark in marks_of(net).values())


@pytest.mark.parametrize("name", ["rwkv6", "rwkv7"])
def test_sizes_that_do_not_fit_are_refused(name):
    with pytest.raises(ValueError, match=f"mixer '{name}': hidden_size is 8, .* multiple of head_dim \\(3\\)"):
        build(name, MixerConfig(hidden_size=8, num_heads=2, head_dim=3))
    with pytest.raises(ValueError, match=f"mixer '{name}': decay_rank is 0, expected at least 1"):
        build(name, MixerConfig(hidden_size=8, num_heads=2, options={"decay_rank": 0}))
