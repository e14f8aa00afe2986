"""The delta rule's mixers against transformers' own layers with the same weights, and against each other."""

import pytest
import torch
from transformers import KimiLinearConfig, OlmoHybridConfig, Qwen3NextConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from latte.layers.marks import marks_of
from latte.mixers import MixerConfig, build
from latte.ops import delta_attention
from latte.tokens import Tokens
from tests.mixers.oracle import perturbed
from tests.ops.helpers import assert_close, generator, normal

pytestmark = pytest.mark.usefixtures("each_backend")
D, H, KEY, VALUE = 24, 4, 6, 9
LENGTHS = [1, 2, 5, 63, 64, 65, 130]


def ours(name="gated-deltanet", key_heads=H, **options):
    """Not of their defaults in anything."""
    fractions = {"key_fraction": H * KEY / D, "value_fraction": H * VALUE / D, "key_heads": key_heads, "conv_size": 3}
    config = MixerConfig(hidden_size=D, num_heads=H, norm_eps=1e-5, options={**fractions, **options})
    return perturbed(build(name, config))


def sizes(key_heads):
    return {
        "hidden_size": D,
        "rms_norm_eps": 1e-5,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": H,
        "linear_num_key_heads": key_heads,
        "linear_key_head_dim": KEY,
        "linear_value_head_dim": VALUE,
        "linear_conv_kernel_dim": 3,
    }


def olmo(mixer, negative):
    """Theirs, with our weights."""
    theirs = OlmoHybridGatedDeltaNet(OlmoHybridConfig(**sizes(H), linear_allow_neg_eigval=negative), 0)
    weights = {
        name: weight for name, weight in mixer.state_dict().items() if name not in ("conv_weight", "norm.weight")
    }
    weights |= {"conv1d.weight": mixer.conv_weight[:, None], "o_norm.weight": mixer.norm.weight}
    theirs.load_state_dict(weights, strict=True)
    return theirs


def qwen(mixer, key_heads):
    """Theirs, with our weights: the rows of one projection, group by group."""
    theirs = Qwen3NextGatedDeltaNet(Qwen3NextConfig(**sizes(key_heads)), 0)
    parts = [
        getattr(mixer, f"{name}_proj").weight.unflatten(0, (key_heads, -1)) for name in ("q", "k", "v", "g", "b", "a")
    ]
    weights = {
        "in_proj_qkvz.weight": torch.cat(parts[:4], dim=1).flatten(0, 1),
        "in_proj_ba.weight": torch.cat(parts[4:], dim=1).flatten(0, 1),
        "conv1d.weight": mixer.conv_weight[:, None],
        "norm.weight": mixer.norm.weight,
        "out_proj.weight": mixer.o_proj.weight,
        "A_log": mixer.A_log,
        "dt_bias": mixer.dt_bias,
    }
    theirs.load_state_dict(weights, strict=True)
    return theirs


def kimi(mixer):
    """Theirs, with our weights: keys and values have one width."""
    theirs = KimiLinearDeltaAttention(
        KimiLinearConfig(
            **{name: value for name, value in sizes(H).items() if name in ("hidden_size", "rms_norm_eps")},
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            linear_num_heads=H,
            linear_head_dim=KEY,
            linear_conv_kernel_dim=3,
        ),
        0,
    )
    weights = {f"{name}_proj.weight": getattr(mixer, f"{name}_proj").weight for name in ("q", "k", "v", "b", "o")}
    weights |= {
        "conv1d.weight": mixer.conv_weight[:, None],
        "o_norm.weight": mixer.norm.weight,
        "forget_gate.f_a_proj.weight": mixer.decay_proj.down.weight,
        "forget_gate.f_b_proj.weight": mixer.decay_proj.up.weight,
        "forget_gate.dt_bias": mixer.dt_bias,
        "forget_gate.A_log": mixer.A_log.view(1, 1, H, 1),
        "g_a_proj.weight": mixer.gate_proj.down.weight,
        "g_b_proj.weight": mixer.gate_proj.up.weight,
    }
    theirs.load_state_dict(weights, strict=True)
    return theirs


@pytest.mark.parametrize("T", LENGTHS)
def test_kda_is_that_of_kimi_linear(T):
    mixer = ours("kda", value_fraction=H * KEY / D)
    compare(mixer, kimi(mixer), T)


def test_kda_with_equal_paces_of_all_channels_is_gated_deltanet():
    kda, gated = ours("kda").double(), ours("gated-deltanet").double()
    shared = {name: weight for name, weight in kda.state_dict().items() if name not in ("dt_bias", "A_log")}
    gated.load_state_dict(shared, strict=False)
    x = normal(generator(0), 2, 33, D)
    with torch.no_grad():
        kda.decay_proj.up.weight.zero_()
        gated.a_proj.weight.zero_()
        kda.dt_bias.copy_(gated.dt_bias.repeat_interleave(KEY))
        gated.A_log.copy_(kda.A_log)
        heads = [mixer.mix_heads(x, mixer.values(x), None, Tokens.of(x))[0] for mixer in (kda, gated)]
    assert_close(heads[0], heads[1], 1e-12)


@torch.no_grad()
def compare(mixer, theirs, T):
    x = normal(generator(T), 2, T, D, dtype=torch.float32)
    assert_close(mixer(x)[0], theirs(x), 1e-5)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_gated_deltanet_is_that_of_qwen3_next(T, key_heads):
    mixer = ours(key_heads=key_heads)
    compare(mixer, qwen(mixer, key_heads), T)


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("negative", [False, True])
def test_gated_deltanet_is_that_of_olmo_hybrid(T, negative):
    mixer = ours(negative_eigenvalues=negative)
    compare(mixer, olmo(mixer, negative), T)


def test_gradients_are_those_of_olmo_hybrid():
    mixer = ours()
    theirs = olmo(mixer, False)
    x = normal(generator(0), 2, 70, D, dtype=torch.float32)
    mixer(x)[0].square().sum().backward()
    theirs(x).square().sum().backward()
    other = dict(theirs.named_parameters())
    renamed = {"conv_weight": "conv1d.weight", "norm.weight": "o_norm.weight"}
    for name, weight in mixer.named_parameters():
        wanted = other[renamed.get(name, name)].grad
        assert_close(weight.grad, wanted.reshape(weight.shape), 2e-5, what=name)


def test_without_decay_and_gate_it_is_deltanet():
    gated, plain = ours().double(), ours("deltanet").double()
    plain.load_state_dict(gated.state_dict(), strict=False)  # what it does not have is left out
    x = normal(generator(0), 2, 33, D)
    with torch.no_grad():
        gated.A_log.fill_(-1e3)
        heads = [mixer.mix_heads(x, mixer.values(x), None, Tokens.of(x))[0] for mixer in (gated, plain)]
    assert_close(heads[0], heads[1], 1e-12)


def test_a_key_that_was_written_at_rate_one_reads_its_value_back():
    """What linear attention can't: the value replaces whatever the key read before."""
    g = generator(0)
    k = torch.nn.functional.normalize(normal(g, 1, 20, 1, 6), dim=-1)
    v = normal(g, 1, 20, 1, 5)
    y, _ = delta_attention(k, k, v, k)
    assert_close(y, v, 1e-12)


def test_parameters_start_where_the_paper_says():
    mixer = build("gated-deltanet", MixerConfig(hidden_size=512, num_heads=128))
    step, rate = torch.nn.functional.softplus(mixer.dt_bias), mixer.A_log.exp()
    assert 0.9e-3 < step.min() < 2e-3
    assert 0.5e-1 < step.max() < 1.01e-1
    assert 0 < rate.min() < 1
    assert 15 < rate.max() <= 16
    assert {name for name, mark in marks_of(mixer).items() if mark.decay is False} == {"A_log", "dt_bias"}


def test_the_default_has_six_squares_of_parameters():
    mixer = build("gated-deltanet", MixerConfig(hidden_size=256, num_heads=4))
    assert sum(p.numel() for p in mixer.parameters()) == pytest.approx(6 * 256**2, rel=0.02)


def test_sizes_that_do_not_fit_are_refused():
    def make(**options):
        return build("deltanet", MixerConfig(hidden_size=8, num_heads=2, options=options))

    with pytest.raises(ValueError, match=r"mixer 'deltanet': key_fraction \* hidden_size is 7, .* num_heads \(2\)"):
        make(key_fraction=0.9)
    with pytest.raises(ValueError, match=r"mixer 'deltanet': num_heads is 2, .* multiple of key_heads \(3\)"):
        make(key_heads=3)
    with pytest.raises(ValueError, match="mixer 'deltanet': conv_size is 0, expected at least 1"):
        make(conv_size=0)
