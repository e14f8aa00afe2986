"""Feature maps of linear attention against attention weights written out, in float64."""

import pytest
import torch
import torch.nn.functional as F

from latte.mixers import MixerConfig, build
from tests.ops.helpers import assert_close, generator, normal

pytestmark = pytest.mark.usefixtures("each_backend")
D, H, T = 8, 2, 17


def projected(features, bidirectional=False, **options):
    config = MixerConfig(
        hidden_size=D, num_heads=H, bidirectional=bidirectional, options={"features": features, **options}
    )
    module = build("linear", config).double()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.add_(0.5 * normal(generator(len(name)), *parameter.shape))
    x = normal(generator(0), 2, T, D)
    q, k, v = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    return module, x, q, k, v


def output(module, weights, v):
    y = (weights / weights.sum(-1, keepdim=True)) @ v
    return module.o_proj(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_based_is_the_exponential_to_second_order(bidirectional):
    module, x, q, k, v = projected("based", bidirectional, key_width=3)
    r = q @ k.mT / 3**0.5
    weights = 1 + r + r.square() / 2
    assert_close(module(x)[0], output(module, weights if bidirectional else weights.tril(), v))


def test_hedgehog_is_two_softmaxes_of_a_learned_map():
    module, x, q, k, v = projected("hedgehog", floor=1e-3)

    def features(z, weight):
        mapped = torch.einsum("bhtk,hjk->bhtj", z, weight)
        return torch.cat([mapped.softmax(-1), F.softmax(-mapped, -1)], -1) + 1e-3

    weights = features(q, module.q_map) @ features(k, module.k_map).mT
    assert_close(module(x)[0], output(module, weights.tril(), v))


def test_hedgehog_starts_from_the_identity():
    module = build("linear", MixerConfig(hidden_size=D, num_heads=H, options={"features": "hedgehog"}))
    assert torch.equal(module.k_map, torch.eye(4).expand(H, 4, 4))


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="key_width is 0, expected at least 1"):
        build("linear", MixerConfig(hidden_size=D, num_heads=H, options={"key_width": 0}))
    with pytest.raises(ValueError, match="features is 'relu', expected one of 'elu', 'hedgehog', 'based'"):
        build("linear", MixerConfig(hidden_size=D, num_heads=H, options={"features": "relu"}))
