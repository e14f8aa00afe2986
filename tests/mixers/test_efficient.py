"""Efficient attention is bidirectional Latte, and its equation written out."""

import pytest
import torch

from latte.mixers import MixerConfig, build
from latte.models import LatteForSequenceClassification, preset
from latte.tokens import Tokens
from tests.mixers.oracle import perturbed
from tests.ops.helpers import assert_close, flags, generator, normal

pytestmark = pytest.mark.usefixtures("each_backend")
D, H, K, T = 8, 2, 3, 19


def mixer(name, **options):
    return build(name, MixerConfig(hidden_size=D, num_heads=H, bidirectional=True, options=options)).double()


def test_it_is_bidirectional_latte_with_key_channels_as_latents():
    """The same weights in both: every output is the same to the last bit, with padding and documents."""
    ours, latte = perturbed(mixer("efficient", key_width=K)), mixer("latte", num_latents=H * K)
    names = {"q_proj": "latent_q_proj", "k_proj": "latent_k_proj", "v_proj": "v_proj", "o_proj": "o_proj"}
    weights = ours.state_dict()
    latte.load_state_dict({f"{other}.weight": weights[f"{name}.weight"] for name, other in names.items()})
    g = generator(0)
    x = normal(g, 3, T, D)
    tokens = Tokens.of(x, mask=flags(g, 3, T, 0.7), reset=flags(g, 3, T, 0.1))
    for given in (None, tokens):
        assert torch.equal(ours(x, tokens=given)[0], latte(x, tokens=given)[0])


def test_it_is_two_softmaxes_around_a_product():
    module, x = perturbed(mixer("efficient", key_width=K)), normal(generator(0), 2, T, D)
    q, k, v = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    y = q.softmax(-1) @ (k.softmax(-2).mT @ v)
    assert_close(module(x)[0], module.o_proj(y.transpose(1, 2).flatten(2)))


def test_its_preset_classifies():
    model = LatteForSequenceClassification(preset("efficient", vocab_size=32, num_labels=3))
    assert model(torch.arange(7)[None]).logits.shape == (1, 3)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="mixer 'efficient': key_width is 0, expected at least 1"):
        mixer("efficient", key_width=0)
    with pytest.raises(ValueError, match="mixer 'efficient' is bidirectional only, but causal was asked for"):
        build("efficient", MixerConfig(hidden_size=D, num_heads=H))
