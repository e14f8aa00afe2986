"""S4D against its convolution kernel written out, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from latte.mixers import MixerConfig, build
from latte.mixers.s4d import start_frequencies
from tests.mixers.oracle import perturbed
from tests.ops.helpers import assert_close, generator, normal

D, T, N = 5, 150, 6


def mixer(bidirectional=False, moved=0.3, **options):
    config = MixerConfig(hidden_size=D, num_heads=1, bidirectional=bidirectional, options={"state_size": N, **options})
    return perturbed(build("s4d", config).double(), moved)


def kernel(module, side):
    """K_l = 2 Re sum_n C_n (e^{Delta A_n} - 1) / A_n e^{l Delta A_n}, (T, D)."""
    A = torch.complex(-1e-4 - module.log_rate.exp(), module.frequency)
    C, step = torch.view_as_complex(module.out_weight[side].detach()), module.log_step.exp()[:, None]
    lag = torch.arange(T).double()[:, None, None]
    return 2 * (C * ((step * A).exp() - 1) / A * (lag * step * A).exp()).sum(-1).real


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.usefixtures("each_backend")
@torch.no_grad()
def test_it_is_a_convolution_with_a_gate(bidirectional):
    module, x = mixer(bidirectional), normal(generator(0), 2, T, D)
    lag = torch.arange(T)[:, None] - torch.arange(T)
    taps = torch.where((lag >= 0)[..., None], kernel(module, 0)[lag.clamp(min=0)], 0.0)
    if bidirectional:
        taps = taps + torch.where((lag <= 0)[..., None], kernel(module, 1)[(-lag).clamp(min=0)], 0.0)
    y = torch.einsum("tsd,bsd->btd", taps, x) + module.skip * x
    value, gate = module.out_proj(F.gelu(y)).chunk(2, dim=-1)
    assert_close(module(x)[0], value * gate.sigmoid())


def test_starting_frequencies_are_the_papers():
    assert_close(start_frequencies(4, "lin"), torch.tensor([0.0, math.pi], dtype=torch.float64))
    assert_close(start_frequencies(4, "inv"), torch.tensor([12.0, 4 / 3], dtype=torch.float64) / math.pi)
    assert start_frequencies(8, "legs").unique().numel() == 4
    for start in ("lin", "inv", "legs"):
        module = mixer(moved=0.0, start=start)
        assert_close(module.frequency[0], start_frequencies(N, start), 1e-6)
        assert_close(1e-4 + module.log_rate.exp(), torch.full_like(module.log_rate, 0.5), 1e-6)


def test_options_that_make_no_sense_are_refused():
    for options, message in (
        ({"state_size": 3}, "state_size is 3, expected an even number, at least 2"),
        ({"dt_min": 0.2}, "dt_min is 0.2 and dt_max is 0.1, expected 0 < dt_min <= dt_max"),
    ):
        with pytest.raises(ValueError, match=f"mixer 's4d': {message}"):
            mixer(**options)
