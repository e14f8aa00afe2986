"""Mega against its kernels and its attention written out, in float64."""

import pytest
import torch
import torch.nn.functional as F

from latte.mixers import MixerConfig, build
from latte.tokens import Tokens
from tests.mixers.test_oracles import turned
from tests.ops.helpers import assert_close, generator, normal

pytestmark = pytest.mark.usefixtures("each_backend")
D, T, Z = 6, 17, 4


def kernel(average):
    """K_l = sum_n p b c (1 - p d)^l / sqrt(N), (T, D)."""
    p, d = torch.sigmoid(average.rate), torch.sigmoid(average.damping)
    power = torch.arange(T).double()[:, None, None]
    return (p * average.entry * average.read * (1 - p * d) ** power).sum(-1) / average.rate.shape[1] ** 0.5


def at_places(x):
    """(B, T, Z) turned by their places."""
    return turned(x[:, :, None], torch.arange(T).expand(len(x), -1))[:, :, 0]


def softmax_weights(q, k, seen):
    return (at_places(q) @ at_places(k).mT / Z**0.5).masked_fill(~seen, -torch.inf).softmax(-1)


def laplace_weights(module, q, k, seen):
    alpha, beta = (at_places(vector.expand(1, T, Z)) for vector in module.bias)
    scores = q @ k.mT / seen.sum(-1, keepdim=True) + alpha @ beta.mT
    mean, deviation = torch.tensor([0.5, 0.25 / torch.pi], dtype=torch.float64).sqrt()
    return torch.where(seen, torch.special.ndtr((scores - mean) / deviation), 0.0)


@pytest.mark.parametrize("attention", ["softmax", "laplace"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("chunk", [None, 5])
def test_it_is_gated_attention_on_a_damped_average(chunk, bidirectional, attention):
    options = {"attention": attention, "chunk": chunk, "ema_size": 3, "key_width": Z}
    module = build(
        "mega", MixerConfig(hidden_size=D, num_heads=1, bidirectional=bidirectional, options=options)
    ).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5 * normal(generator(parameter.numel()), *parameter.shape))
    x = normal(generator(0), 2, T, D)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    taps = torch.where((distance >= 0)[..., None], kernel(module.average)[distance.clamp(min=0)], 0.0)
    if bidirectional:
        back = kernel(module.back_average)[(-distance).clamp(min=0)]
        taps = taps + torch.where((distance <= 0)[..., None], back, 0.0)
    m = F.silu(torch.einsum("tsd,bsd->btd", taps, x) + module.skip * x)
    u, z, r, h = module.in_proj(m).split([D, Z, 2 * D, D], -1)
    q, k = (F.silu(z) * module.scale[i] + module.shift[i] for i in range(2))
    seen = torch.ones(T, T).bool() if bidirectional else distance >= 0
    if chunk is not None:
        seen = seen & (torch.arange(T)[:, None] // chunk == torch.arange(T) // chunk)
    weights = laplace_weights(module, q, k, seen) if attention == "laplace" else softmax_weights(q, k, seen)
    a = weights @ F.silu(module.v_proj(x))
    expected = torch.sigmoid(u) * (F.silu(h + (F.silu(r) * a) @ module.h_proj.weight.T) - x)
    assert_close(module(x, tokens=Tokens.of(x))[0], expected)


def test_bad_options_are_refused():
    for options, expected in (
        ({"chunk": 0}, "chunk is 0, expected at least 1"),
        ({"key_width": 3}, "key_width is 3"),
        ({"attention": "relu2"}, "attention is 'relu2', expected one of 'softmax', 'laplace'"),
    ):
        with pytest.raises(ValueError, match=expected):
            build("mega", MixerConfig(hidden_size=D, num_heads=1, options=options))
