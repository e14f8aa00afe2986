"""Mamba against transformers' own: the same weights, logits and continuations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import MambaConfig, MambaForCausalLM

from latte.mixers import MixerConfig, build
from latte.models import LatteConfig, LatteForCausalLM, preset
from tests.mixers.oracle import VOCABULARY, T, copy_weights, float_is_double, perturbed, token_ids
from tests.ops.helpers import assert_close

pytestmark = pytest.mark.usefixtures("each_backend")
LAYERS, WIDTH, STATE = 2, 24, 5


def pair(dtype, scale=0.3):
    """Their model and ours, with the same weights.

    Theirs computes norms, e^{A_log}, Delta's bias and what enters the state in float32, whatever the model's dtype.
    """
    torch.manual_seed(0)
    settings = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS}
    theirs = MambaForCausalLM(
        MambaConfig(**settings, state_size=STATE, residual_in_fp32=False, tie_word_embeddings=False)
    )
    perturbed(theirs.to(dtype), scale)
    if dtype == torch.float64:
        for module in theirs.modules():
            if type(module).__name__ == "MambaRMSNorm":
                module.forward = norm_of(module)
    options = {"state_size": STATE}
    config = LatteConfig(
        **settings,
        mixer="mamba",
        mixer_options=options,
        pattern=[["mixer"]],
        norm_eps=theirs.config.layer_norm_epsilon,
        tie_word_embeddings=False,
    )
    ours = LatteForCausalLM(config).to(dtype).eval()
    names = {"model.embed_tokens.weight": "backbone.embeddings.weight"}
    names |= {"model.norm.weight": "backbone.norm_f.weight", "lm_head.weight": "lm_head.weight"}
    parts = {
        "mixer_norm.weight": "norm.weight",
        "mixer.conv_weight": "mixer.conv1d.weight",
        "mixer.conv_bias": "mixer.conv1d.bias",
        "mixer.dt_bias": "mixer.dt_proj.bias",
        **{f"mixer.{same}": f"mixer.{same}" for same in ("A_log", "D")},
        **{f"mixer.{same}.weight": f"mixer.{same}.weight" for same in ("in_proj", "x_proj", "dt_proj", "out_proj")},
    }
    for layer in range(LAYERS):
        names |= {f"model.layers.{layer}.{a}": f"backbone.layers.{layer}.{b}" for a, b in parts.items()}
    copy_weights(ours, theirs, names)
    return theirs, ours


def norm_of(module: nn.Module):
    return lambda x: F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


@pytest.mark.parametrize("length", [1, 2, 17, T])
def test_logits_are_those_of_transformers(length):
    theirs, ours = pair(torch.float32)
    ids = token_ids(length=length)
    with torch.no_grad():
        assert_close(ours(ids).logits, theirs(ids).logits, 1e-5)


@pytest.mark.parametrize("scale", [0.0, 0.2])
def test_logits_agree_in_absolute_terms(scale):
    """Weights as transformers draws them, and all of them moved: logits reach 2 and 4."""
    theirs, ours = pair(torch.float32, scale)
    ids = token_ids()
    with torch.no_grad():
        assert (ours(ids).logits - theirs(ids).logits).abs().max() < 1e-5


def test_logits_are_those_of_transformers_in_float64():
    """Their casts to float32 lifted: the same function to the last digits."""
    theirs, ours = pair(torch.float64)
    ids = token_ids()
    with torch.no_grad(), float_is_double():
        assert_close(ours(ids).logits, theirs(ids).logits, 1e-12)


def test_gradients_are_those_of_transformers():
    theirs, ours = pair(torch.float64)
    ids = token_ids()
    gradients = []
    for model, embedding in ((theirs, theirs.backbone.embeddings), (ours, ours.model.embed_tokens)):
        with float_is_double():
            loss = model(ids, labels=ids).loss
            loss.backward()
        gradients.append(embedding.weight.grad)
    assert gradients[0].abs().max() > 1e-3
    assert_close(gradients[1], gradients[0], 1e-10)


def test_cached_decoding_chooses_the_same_tokens():
    theirs, ours = pair(torch.float32)
    ids = token_ids(length=9)
    settings = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    assert torch.equal(ours.generate(ids, **settings), theirs.generate(ids, **settings))


def test_time_steps_start_between_their_bounds():
    torch.manual_seed(0)
    mixer = build("mamba", MixerConfig(hidden_size=256, num_heads=4))
    assert mixer.rank == 16
    assert LatteForCausalLM(preset("mamba", "tiny")).model.layers[0].mixer.A_log[3, 4].exp().item() == pytest.approx(5)
    step = F.softplus(mixer.dt_bias)
    assert step.min() >= 1e-3 * 0.999
    assert step.max() <= 1e-1 * 1.001
    # Log-uniform: half of them below the geometric mean.
    assert (step < 1e-2).float().mean().item() == pytest.approx(0.5, abs=0.1)
    assert (mixer.A_log.exp()[0] - torch.arange(1, 17)).abs().max() < 1e-5
    assert mixer.dt_proj.weight.abs().max() <= 16**-0.5
    assert (mixer.D == 1).all()


@pytest.mark.parametrize("name", ["state_size", "expand", "conv_size", "dt_rank"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"mixer 'mamba': {name} is 0, expected at least 1"):
        build("mamba", MixerConfig(hidden_size=8, num_heads=2, options={name: 0}))
