"""Mixers against other people's code, and against their equations written out pair by pair."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, RecurrentGemmaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

from latte.layers.feeds import RGLRU, ConvFeed
from latte.layers.rotary import rotary
from latte.mixers import MixerConfig, build
from latte.tokens import Tokens
from tests.ops.helpers import assert_close, generator, normal

#: Each mixer through every path that can serve it.
pytestmark = pytest.mark.usefixtures("each_backend")
D, H, WIDTH = 8, 4, 2


def mixer(name, seed=0, **fields):
    """A mixer in float64 with weights large enough to matter."""
    options = {key: fields.pop(key) for key in list(fields) if key not in MixerConfig.__dataclass_fields__}
    module = build(name, MixerConfig(hidden_size=D, num_heads=H, options=options, **fields)).double()
    g = generator(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.6 * normal(g, *parameter.shape))
    return module


def heads(x, count):
    return x.unflatten(-1, (count, -1))


def turned(x, place):
    """Llama's rotary encoding of (B, T, H, K) at the given places."""
    config = LlamaConfig(hidden_size=x.shape[2] * x.shape[3], num_attention_heads=x.shape[2], head_dim=x.shape[3])
    frequencies = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, x.shape[3], 2).double() / x.shape[3])
    angle = place[..., None].double() * frequencies
    angle = torch.cat([angle, angle], -1)
    return apply_rotary_pos_emb(x, x, angle.cos().to(x.dtype), angle.sin().to(x.dtype), unsqueeze_dim=2)[0]


def causal(T, left=None):
    distance = torch.arange(T)[:, None] - torch.arange(T)
    return (distance >= 0) & (distance <= (T if left is None else left))


@pytest.mark.parametrize("T", [1, 2, 70])
def test_the_rglru_is_that_of_recurrentgemma(T):
    """Same weights, several documents in a row, one of a single token; RecurrentGemma accumulates in float32."""
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(lru_width=12, num_attention_heads=3, hidden_size=12)
    theirs, ours = RecurrentGemmaRglru(config), RGLRU(12, 3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        theirs.recurrent_param.copy_(ours.decay)
        ours.gate_weight.copy_(torch.stack([theirs.recurrent_gate_weight, theirs.input_gate_weight]))
        ours.gate_bias.copy_(torch.stack([theirs.recurrent_gate_bias, theirs.input_gate_bias]))
    x = torch.randn(2, T, 12, requires_grad=True)
    reset = torch.zeros(2, T, dtype=torch.bool)
    reset[:, 0] = True
    if T > 2:
        reset[0, [5, 6, 64]] = True
    place = torch.stack([torch.cat([torch.arange(n) for n in _lengths(row, T)]) for row in reset])
    expected = theirs(x, place)
    y, _ = ours(x, None, Tokens.of(x, reset=reset))
    assert_close(y, expected)
    direction = torch.randn(y.shape)
    got, wanted = (torch.autograd.grad((z * direction).sum(), x)[0] for z in (y, expected))
    assert_close(got, wanted)


def test_the_rglru_continues_as_recurrentgemma_does():
    torch.manual_seed(1)
    theirs = RecurrentGemmaRglru(RecurrentGemmaConfig(lru_width=6, num_attention_heads=2, hidden_size=6))
    ours = RGLRU(6, 2)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape))
        ours.decay.copy_(theirs.recurrent_param)
        ours.gate_weight.copy_(torch.stack([theirs.recurrent_gate_weight, theirs.input_gate_weight]))
        ours.gate_bias.copy_(torch.stack([theirs.recurrent_gate_bias, theirs.input_gate_bias]))
    state = None
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 6), (6, 7)):
            x = torch.randn(2, stop - start, 6)
            start_B = None if state is None else torch.tensor([start, start])
            y, state = ours(x, state, Tokens.of(x, start=start_B))
            assert_close(y, theirs(x, torch.arange(start, stop).expand(2, -1)))


def _lengths(reset, T):
    starts = [*reset.nonzero()[:, 0].tolist(), T]
    return [b - a for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize(("radius", "power"), [("base", 1), ("power", 8)])
def test_the_rglru_starts_with_radii_between_0_9_and_0_999(radius, power):
    torch.manual_seed(0)
    a = torch.exp(-power * F.softplus(RGLRU(4000, 4, radius).decay))
    assert a.min() >= 0.9
    assert a.max() <= 0.999
    # Uniform on the ring: half of its area lies outside the radius where a^2 is in the middle.
    middle = math.sqrt((0.9**2 + 0.999**2) / 2)
    assert 0.45 < (a > middle).float().mean() < 0.55


def test_the_gradient_of_the_gate_is_bounded_where_it_keeps_everything():
    """a = 1 to the last bit: the square root's slope would be infinite."""
    module = RGLRU(2, 1)
    with torch.no_grad():
        module.decay.fill_(-100.0)
    x = torch.ones(1, 3, 2, requires_grad=True)
    y, _ = module(x, None, Tokens.of(x))
    for gradient in torch.autograd.grad(y.sum(), [x, *module.parameters()]):
        assert torch.isfinite(gradient).all()


@given(T=st.integers(1, 9), seed=st.integers(0, 10**6), theta=st.sampled_from([100.0, 10000.0]))
def test_rotation_is_that_of_llama(T, seed, theta):
    g = generator(seed)
    x = normal(g, 2, T, 3, 6, dtype=torch.float32)
    place = torch.randint(0, 500, (2, T), generator=g)
    config = LlamaConfig(
        hidden_size=18, num_attention_heads=3, head_dim=6, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    cos, sin = LlamaRotaryEmbedding(config)(x, place)
    # Llama's angles are float32: off by 500 * 2^-24.
    assert_close(
        rotary(x.shape[-1], theta).turn_to(x, place), apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)[0], 1e-4
    )
    start = torch.arange(T).expand(2, -1)
    turning = rotary(x.shape[-1], theta)
    assert torch.equal(turning.turn(x, Tokens.of(x)), turning.turn_to(x, start))


def test_rotated_products_see_only_distances():
    g = generator(0)
    q, k = normal(g, 1, 1, 1, 8), normal(g, 1, 1, 1, 8)

    def product(t, s):
        turning = rotary(q.shape[-1], 1e4)
        return (turning.turn_to(q, torch.tensor([[t]])) * turning.turn_to(k, torch.tensor([[s]]))).sum()

    assert_close(product(7, 3), product(1_000_007, 1_000_003), 1e-9)
    assert abs(product(7, 3) - product(3, 7)) > 1e-3


@pytest.mark.parametrize(("groups", "bidirectional"), [(4, False), (2, False), (1, True)])
@pytest.mark.parametrize("T", [1, 17, 70])
def test_linear_is_a_quadratic_formula_in_float64(T, groups, bidirectional):
    module = mixer("linear", num_key_value_heads=groups, bidirectional=bidirectional, floor=1e-3)
    x = normal(generator(T), 2, T, D)
    phi_q = F.elu(heads(module.q_proj(x), H)) + 1.001
    phi_k = F.elu(heads(module.k_proj(x), groups)) + 1.001
    v = heads(module.v_proj(x), groups)
    seen = torch.ones(T, T).bool() if bidirectional else causal(T)
    y = torch.zeros(2, T, H, WIDTH, dtype=torch.float64)
    for h in range(H):
        g = h * groups // H
        weight = phi_q[:, :, h] @ phi_k[:, :, g].mT * seen
        y[:, :, h] = (weight / weight.sum(-1, keepdim=True)) @ v[:, :, g]
    assert_close(module(x)[0], y.flatten(2) @ module.o_proj.weight.T)


@pytest.mark.parametrize("T", [1, 17, 70])
def test_retnet_is_a_sum_that_fades_by_gamma_per_head(T):
    module = mixer("retnet", num_key_value_heads=None)
    x = normal(generator(T), 2, T, D)
    place = torch.arange(T).expand(2, -1)
    q, k = (turned(heads(p(x), H), place) for p in (module.q_proj, module.k_proj))
    v = heads(module.v_proj(x), H)
    distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0).double()
    y = torch.zeros_like(v)
    for h in range(H):
        gamma = 1 - 2.0 ** (-5 - h)
        weight = q[:, :, h] @ k[:, :, h].mT / math.sqrt(WIDTH) * gamma**distance * causal(T)
        y[:, :, h] = weight @ v[:, :, h]
    y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = (y.flatten(2) * F.silu(x @ module.gate_proj.weight.T)) @ module.o_proj.weight.T
    assert_close(module(x)[0], expected)


@pytest.mark.parametrize("T", [1, 17, 70])
@pytest.mark.parametrize("temperature", [1.0, 16.0])
def test_gla_is_a_sum_that_fades_by_channel(T, temperature):
    module = mixer("gla", gate_rank=3, gate_temperature=temperature, key_fraction=1.0)
    x = normal(generator(T), 2, T, D)
    q, k, v = (heads(p(x), H) for p in (module.q_proj, module.k_proj, module.v_proj))
    first, second = module.decay_proj
    alpha = torch.sigmoid(x @ first.weight.T @ second.weight.T + second.bias) ** (1 / temperature)
    alpha = heads(alpha, H)
    y = torch.zeros_like(v)
    for t in range(T):
        fade = torch.ones_like(alpha[:, 0])
        for s in range(t, -1, -1):
            y[:, t] += (q[:, t] * fade * k[:, s]).sum(-1, keepdim=True) * v[:, s] / math.sqrt(WIDTH)
            fade = fade * alpha[:, s]
    y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = (y.flatten(2) * F.silu(x @ module.gate_proj.weight.T)) @ module.o_proj.weight.T
    assert_close(module(x)[0], expected)


def attention(q, k, v, seen):
    y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), attn_mask=seen, enable_gqa=True)
    return y.transpose(1, 2)


@pytest.mark.parametrize(("groups", "rope", "bidirectional"), [(4, True, False), (2, True, True), (2, False, False)])
def test_softmax_is_torch_attention_with_llama_rotation(groups, rope, bidirectional):
    T = 19
    module = mixer("softmax", rope=rope, num_key_value_heads=groups, bidirectional=bidirectional)
    x = normal(generator(1), 2, T, D)
    q, k = heads(module.q_proj(x), H), heads(module.k_proj(x), groups)
    if rope:
        q, k = (turned(z, torch.arange(T).expand(2, -1)) for z in (q, k))
    seen = torch.ones(T, T).bool() if bidirectional else causal(T)
    y = attention(q, k, heads(module.v_proj(x), groups), seen)
    assert_close(module(x)[0], module.o_proj(y.flatten(2)))


def fed(module, feed, x):
    """What feeds the latents, from torch's convolution or from the RG-LRU written as a loop."""
    if feed == "x":
        return x
    if feed == "conv":
        size = module.weight.shape[1]
        return F.conv1d(F.pad(x.mT, (size - 1, 0)), module.weight[:, None], groups=D).mT
    h, outputs = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        r, i = (
            torch.sigmoid(torch.einsum("bhi,hij->bhj", heads(x[:, t], H), w) + b).flatten(1)
            for w, b in zip(module.gate_weight, module.gate_bias, strict=True)
        )
        a = torch.exp(-8 * F.softplus(module.decay) * r)
        h = a * h + (torch.sqrt(1 - a**2) if t else 1) * i * x[:, t]
        outputs.append(h)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("feed", ["x", "conv", "rglru"])
@pytest.mark.parametrize("window", [None, 0, 3])
@pytest.mark.parametrize("extra", [{}, {"feed_norm": True, "slot0_bias": 1.5}, {"num_key_value_heads": 2}])
def test_latte_is_equations_15_to_19(feed, window, extra):
    """One softmax over window and latents; the window reads x with rotation, the latents what is fed to them."""
    T, M, groups = 18, 3, extra.get("num_key_value_heads", H)
    module = mixer("latte", num_latents=H * M, feed=feed, window=window, **extra)
    x = normal(generator(2), 2, T, D)
    y = fed(module.feed, feed, x)
    if module.feed_norm is not None:
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.feed_norm.weight
    v = heads(module.v_proj(x), groups)
    logits, k = heads(y @ module.latent_q_proj.weight.T, H), heads(y @ module.latent_k_proj.weight.T, H)
    if window is not None and module.slot0_bias is not None:
        logits = torch.cat([logits[..., :1] + module.slot0_bias[:, None], logits[..., 1:]], -1)
    p = logits.softmax(-1)
    assert p.shape[-1] == M + (window is not None)
    out = torch.zeros(2, T, H, WIDTH, dtype=torch.float64)
    for t in range(T):
        share = k[:, : t + 1].softmax(1)
        for h in range(H):
            latents = torch.einsum("bl,bsl,bsv->bv", p[:, t, h, -M:], share[:, :, h], v[:, : t + 1, h * groups // H])
            out[:, t, h] = latents
    if window is not None:
        place = torch.arange(T).expand(2, -1)
        q0 = turned(heads(module.window.q_proj(x), H), place)
        k0 = turned(heads(module.window.k_proj(x), groups), place)
        out = out + p[..., :1] * attention(q0, k0, v, causal(T, window))
    assert_close(module(x)[0], module.o_proj(out.flatten(2)))


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_latte_looks_at_sinks_from_right_behind_a_full_window(softcap):
    """The query for sinks is turned as if at place min(t, sinks + window), the one for the window at its own."""
    T, window, sinks = 20, 3, 2
    module = mixer("latte", num_latents=H, window=window, sinks=sinks, softcap=softcap, slot0_bias=50.0)
    x = normal(generator(3), 2, T, D)
    place = torch.arange(T).expand(2, -1)
    q, k = (heads(p(x), H) for p in (module.window.q_proj, module.window.k_proj))
    k = turned(k, place)
    near, far = (
        torch.einsum("bthk,bshk->bhts", turned(q, z), k) / math.sqrt(WIDTH) for z in (place, place.clamp(max=5))
    )
    sunk = causal(T) & ~causal(T, window) & (torch.arange(T) < sinks)
    logits = torch.where(sunk, far, near)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    weights = logits.masked_fill(~(causal(T, window) | sunk), -torch.inf).softmax(-1)
    y = torch.einsum("bhts,bshv->bthv", weights, heads(module.v_proj(x), H))
    p = heads(x @ module.latent_q_proj.weight.T, H)
    p = torch.cat([p[..., :1] + module.slot0_bias[:, None], p[..., 1:]], -1).softmax(-1)
    assert (p[..., 0] > 1 - 1e-6).all()
    assert_close(module(x)[0], module.o_proj(y.flatten(2)), 1e-5)


@pytest.mark.parametrize(("feed", "rope"), [("x", True), ("conv", False), ("rglru", False)])
def test_r_swa_is_a_window_over_what_the_recurrence_feeds(feed, rope):
    T, window = 18, 3
    module = mixer("r-swa", feed=feed, rope=rope, window=window)
    x = normal(generator(4), 2, T, D)
    z = fed(module.feed, feed, x)
    z = z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.feed_norm.weight
    q, k = (heads(p(z), H) for p in (module.window.q_proj, module.window.k_proj))
    if rope:
        q, k = (turned(y, torch.arange(T).expand(2, -1)) for y in (q, k))
    y = attention(q, k, heads(module.v_proj(x), H), causal(T, window))
    assert_close(module(x)[0], module.o_proj(y.flatten(2)))


@pytest.mark.parametrize("feed", ["conv", "rglru"])
def test_a_bidirectional_feed_reads_one_half_of_the_channels_each_way(feed):
    """Reversing the row and swapping the halves of everything reverses the output."""
    module = mixer("latte", num_latents=H, feed=feed, bidirectional=True).feed
    x = normal(generator(5), 2, 9, D)
    y, _ = module(x, None, Tokens.of(x))
    ahead, back = x.chunk(2, -1)
    assert_close(y[..., : D // 2], module.forwards(ahead, None, Tokens.of(x))[0])
    assert_close(y[..., D // 2 :], module.backwards(back.flip(1), None, Tokens.of(x))[0].flip(1))


def test_the_convolution_feed_has_the_present_token_as_its_last_tap():
    feed = ConvFeed(1, 3)
    with torch.no_grad():
        feed.weight.copy_(torch.tensor([[100.0, 10.0, 1.0]]))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0])[None, :, None]
    y, _ = feed(x, None, Tokens.of(x))
    assert y.flatten().tolist() == [1, 12, 123, 234]
