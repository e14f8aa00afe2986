"""H3, SWH and KLA against their kernels and filters written out, and FEM between its limits, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from latte.mixers import MixerConfig, build
from latte.ops import kalman
from latte.tokens import Tokens
from tests.ops.helpers import assert_close, generator, normal

pytestmark = pytest.mark.usefixtures("each_backend")
D, H, T = 8, 2, 21


def mixer(name, **options):
    module = build(name, MixerConfig(hidden_size=D, num_heads=H, options=options)).double()
    g = generator(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * normal(g, *parameter.shape))
    return module, normal(generator(0), 2, T, D)


def toeplitz(kernel_TD):
    """K_{t-s} (T, S, D), 0 for s > t."""
    distance = torch.arange(T)[:, None] - torch.arange(T)
    return torch.where((distance >= 0)[..., None], kernel_TD[distance.clamp(min=0)], 0.0)


def test_h3_is_a_long_convolution_between_two_products():
    module, x = mixer("h3", state_size=6, shift_size=3)
    q, k, v = (p(x) for p in (module.q_proj, module.k_proj, module.v_proj))
    k = F.conv1d(F.pad(k.mT, (2, 0)), module.shift_weight[:, None], groups=D).mT + module.shift_skip * k
    A = torch.complex(-1e-4 - module.log_rate.exp(), module.frequency)
    a = torch.exp(A * module.log_step.exp()[:, None])
    C = torch.view_as_complex(module.out_weight)
    power = torch.arange(T).double()[:, None, None]
    kernel = 2 * (C * (a - 1) / A * a**power).sum(-1).real
    kernel[0] += module.skip
    y = torch.einsum("tsd,bsd->btd", toeplitz(kernel), k * v)
    assert_close(module(x)[0], module.o_proj(q * y))


def test_swh_is_a_damped_cosine_beside_a_window():
    module, x = mixer("swh", window=4)
    n = torch.arange(T).double()[:, None]
    kernel = torch.exp(-module.log_rate.exp() * n) * torch.cos(module.frequency * n)
    c = torch.einsum("tsd,bsd->btd", toeplitz(kernel), module.in_proj(x))
    c = c / (c.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.norm.weight
    tokens = Tokens.of(x)
    local, *_ = module.window(x, module.v_proj(x).unflatten(-1, (H, -1)), module.window.init_state(x), tokens)
    assert_close(module(x)[0], module.o_proj(c + module.local_proj(local.flatten(2))))


def test_kalman_is_the_textbook_filter():
    """Predict and correct with gains and variances, one filter at a time."""
    g = generator(0)
    v, noise, k, q = normal(g, 1, T, 3), normal(g, 1, T, 3).exp(), normal(g, 1, T, 2), normal(g, 1, T, 2)
    a, p = torch.sigmoid(normal(g, 3, 2)), normal(g, 3, 2).exp()
    y, _ = kalman(v, noise, k, q, a, p)
    expected = torch.zeros(1, T, 3, dtype=torch.float64)
    for d in range(3):
        for n in range(2):
            mean, variance = 0.0, 1.0
            for t in range(T):
                mean, variance = a[d, n] * mean, a[d, n] ** 2 * variance + p[d, n]
                gain = variance * k[0, t, n] / (k[0, t, n] ** 2 * variance + 1 / noise[0, t, d])
                mean, variance = mean + gain * (v[0, t, d] - k[0, t, n] * mean), (1 - gain * k[0, t, n]) * variance
                expected[0, t, d] += q[0, t, n] * mean
    assert_close(y, expected)


def test_kla_starts_as_an_ornstein_uhlenbeck_process():
    module = build("kla", MixerConfig(hidden_size=D, num_heads=H)).double()
    a, p = module.process(torch.float64)
    step = module.log_step.exp()
    assert_close(a, torch.exp(-step))
    assert_close(p, 0.005 * (1 - torch.exp(-2 * step)), 1e-6)  # its log is kept in float32
    assert module.skip.item() == -1


@pytest.mark.parametrize("prior", ["softmax", "linear", "gla"])
def test_fem_lies_between_the_mean_and_the_maximum(prior):
    module, x = mixer("fem", prior=prior)
    v = module.values(x)
    mean, _ = module.expectations(x, v, None, Tokens.of(x))
    raised = {}
    for beta in (1e-4, 1.0, 30.0):
        with torch.no_grad():
            module.beta.fill_(math.log(math.expm1(beta)))
        scaled = F.softplus(module.beta) + 1e-6
        both, _ = module.expectations(x, (scaled * v).exp(), None, Tokens.of(x))
        raised[beta] = both.log() / scaled
    assert_close(raised[1e-4], mean, 1e-2)
    assert (raised[1.0] >= mean - 1e-9).all()
    assert (raised[30.0] >= raised[1.0] - 1e-9).all()
    assert (raised[30.0] <= v.cummax(1).values + 1e-9).all()


@pytest.mark.parametrize("prior", ["softmax", "linear", "gla"])
def test_fem_is_a_gated_choice_between_mean_and_free_energy(prior):
    module, x = mixer("fem", prior=prior)
    v = module.values(x)
    beta = F.softplus(module.beta) + 1e-6
    both, _ = module.expectations(x, torch.cat([v, (beta * v).exp()], -1), None, Tokens.of(x))
    mean, free = both[..., :4], both[..., 4:].log() / beta
    choice = torch.sigmoid(module.choice_proj(x).unflatten(-1, (H, -1)))
    gate = F.softplus(module.gate_proj(x).unflatten(-1, (H, -1)))
    gate = gate / (gate.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = module.o_proj((gate * ((1 - choice) * mean + choice * free)).flatten(2))
    assert_close(module(x)[0], expected)


@pytest.mark.parametrize(
    ("name", "option", "value", "expected"),
    [
        ("h3", "state_size", 3, "state_size is 3, expected an even number, at least 2"),
        ("h3", "shift_size", 0, "shift_size is 0, expected at least 1"),
        ("kla", "noise_rank", 0, "noise_rank is 0, expected at least 1"),
        ("fem", "prior", "aft", "prior is 'aft', expected one of 'softmax', 'linear', 'gla'"),
        ("swh", "window", -1, "window is -1"),
    ],
)
def test_bad_options_are_refused(name, option, value, expected):
    with pytest.raises(ValueError, match=expected):
        build(name, MixerConfig(hidden_size=D, num_heads=H, options={option: value}))
