"""CHELA against its kernels and its attention written out, in float64."""

import pytest
import torch
import torch.nn.functional as F

from latte.mixers import MixerConfig, build
from latte.tokens import Tokens
from tests.mixers.oracle import perturbed
from tests.ops.helpers import assert_close, flags, generator, normal

pytestmark = pytest.mark.usefixtures("each_backend")
D, T, Z = 6, 19, 4


def mixer(bidirectional=False, **options):
    options = {"short_size": 3, "long_size": 7, "key_width": Z, **options}
    config = MixerConfig(hidden_size=D, num_heads=1, bidirectional=bidirectional, options=options)
    return perturbed(build("chela", config).double())


def convolved(x, weight):
    """One document (T, D): torch's own convolution with a kernel whose right half is the second side's, if any."""
    kernel = F.pad(weight[0], (0, weight.shape[-1] - 1))
    if len(weight) == 2:
        kernel = kernel + F.pad(weight[1].flip(-1), (weight.shape[-1] - 1, 0))
    return F.conv1d(x.T[None], kernel[:, None], padding=weight.shape[-1] - 1, groups=D)[0].T


def written_out(module, x):
    """One document (T, D)."""
    options, bidirectional = module.options, module.config.bidirectional
    near = F.silu(convolved(x, module.short_weight))
    m = convolved(near, module.long_weight) + convolved(near, module.near_weight)
    u, z, r, h = module.in_proj(m).split([D, Z, options.value_expansion * D, D], -1)
    q, k = (F.silu(z) * module.scale[i] + module.shift[i] for i in range(2))
    products = q @ k.T if bidirectional else (q @ k.T).tril()
    a = products @ F.silu(module.v_proj(x))
    a = a / a.square().mean(-1, keepdim=True).sqrt()
    return torch.sigmoid(u) * (F.silu(h + (F.silu(r) * a) @ module.h_proj.weight.T) - x)


@pytest.mark.parametrize("bidirectional", [False, True])
@torch.no_grad()
def test_it_is_gated_linear_attention_on_a_short_and_a_long_convolution(bidirectional):
    module, g = mixer(bidirectional), generator(0)
    module.norm.eps = 0.0
    x, mask, reset = normal(g, 2, T, D), flags(g, 2, T, 0.8), flags(g, 2, T, 0.1)
    # q is divided by its length + 1e-6, which the norm undoes to its last digits.
    assert_close(module(x)[0], torch.stack([written_out(module, row) for row in x]))
    y, document = module(x, tokens=Tokens.of(x, mask=mask, reset=reset))[0], reset.long().cumsum(1)
    for row in range(2):
        for number in document[row].unique():
            real = (document[row] == number) & mask[row]
            if real.any():
                assert_close(y[row, real], written_out(module, x[row, real]), what=f"row {row}, document {number}")


def test_a_state_holds_the_taps_of_both_kernels_and_one_matrix():
    x = normal(generator(0), 1, T, D)
    assert mixer().init_state(x).nbytes == 8 * ((3 - 1) * D + (7 - 1) * D + Z * 2 * D)


def test_bad_options_are_refused():
    for options, message in (
        ({"short_size": 0}, "short_size is 0, expected at least 1"),
        ({"short_size": 8}, r"long_size is 7, expected at least short_size \(8\)"),
        ({"key_width": 0}, "key_width is 0, expected at least 1"),
        ({"value_expansion": 0}, "value_expansion is 0, expected at least 1"),
    ):
        with pytest.raises(ValueError, match=f"mixer 'chela': {message}"):
            mixer(**options)
