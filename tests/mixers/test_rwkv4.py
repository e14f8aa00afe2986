"""RWKV-4 against transformers' own: the same weights, logits and continuations."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import RwkvConfig, RwkvForCausalLM

from latte.models import LatteConfig, LatteForCausalLM, preset
from tests.mixers.oracle import VOCABULARY, T, copy_weights, float_is_double, perturbed, token_ids
from tests.ops.helpers import assert_close

pytestmark = pytest.mark.usefixtures("each_backend")
LAYERS, WIDTH, INNER = 2, 24, 40


def pair(dtype):
    """Their model and ours, with the same weights. Theirs casts keys, and numerator, denominator and maximum of the
    state, to float32."""
    torch.manual_seed(0)
    settings = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": INNER}
    settings |= {"num_hidden_layers": LAYERS, "tie_word_embeddings": False}
    theirs = perturbed(RwkvForCausalLM(RwkvConfig(**settings, rescale_every=0)).to(dtype))
    config = LatteConfig(
        **settings,
        mixer="rwkv4",
        pattern=[["mixer", "rwkv4-channel"]],
        norm="layer",
        norm_eps=theirs.config.layer_norm_epsilon,
        embedding_norm=True,
    )
    ours = LatteForCausalLM(config).to(dtype).eval()
    names = {"model.embed_tokens.weight": "rwkv.embeddings.weight", "lm_head.weight": "head.weight"}
    norms = {"model.norm": "rwkv.ln_out", "model.embed_norm": "rwkv.blocks.0.pre_ln"}
    for layer in range(LAYERS):
        mine, other = f"model.layers.{layer}.", f"rwkv.blocks.{layer}."
        norms |= {f"{mine}mixer_norm": f"{other}ln1", f"{mine}mixer_2_norm": f"{other}ln2"}
        for a, b in (("mixer.", "attention."), ("mixer_2.", "feed_forward.")):
            a, b = mine + a, other + b
            for short, whole in (("k", "key"), ("v", "value"), ("r", "receptance")):
                names[f"{a}{short}_proj.weight"] = f"{b}{whole}.weight"
                if short != "v" or "attention" in b:
                    names[f"{a}mu_{short}"] = f"{b}time_mix_{whole}"
        a, b = mine + "mixer.", other + "attention."
        names |= {f"{a}o_proj.weight": f"{b}output.weight"}
        names |= {f"{a}{same}": f"{b}{same}" for same in ("time_decay", "time_first")}
    names |= {f"{a}.{part}": f"{b}.{part}" for a, b in norms.items() for part in ("weight", "bias")}
    copy_weights(ours, theirs, names)
    return theirs, ours


@pytest.mark.parametrize("length", [1, 2, 17, T])
def test_logits_are_those_of_transformers(length):
    theirs, ours = pair(torch.float32)
    ids = token_ids(length=length)
    with torch.no_grad():
        assert_close(ours(ids).logits, theirs(ids, use_cache=False).logits, 1e-5)


def test_logits_are_those_of_transformers_in_float64():
    """Their cast of keys lifted: the same function to the last digits."""
    theirs, ours = pair(torch.float64)
    ids = token_ids()
    with torch.no_grad(), float_is_double():
        assert_close(ours(ids).logits, theirs(ids, use_cache=False).logits, 1e-12)


def test_gradients_are_those_of_transformers():
    theirs, ours = pair(torch.float64)
    ids = token_ids()
    gradients = []
    for model, parts in ((theirs, theirs.rwkv.blocks[0].attention), (ours, ours.model.layers[0].mixer)):
        with float_is_double():
            model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(torch.cat([parts.time_decay.grad, parts.time_first.grad]))
    assert gradients[0].abs().max() > 1e-4
    assert_close(gradients[1], gradients[0], 1e-10)


def test_cached_decoding_chooses_the_same_tokens():
    """One row: theirs mixes up the rows of a batch when it shifts a single token."""
    theirs, ours = pair(torch.float32)
    ids = token_ids(rows=1, length=9)
    with torch.no_grad():
        output = theirs(ids, use_cache=True)
        for _ in range(24):
            ids = torch.cat([ids, output.logits[:, -1:].argmax(-1)], dim=1)
            output = theirs(ids[:, -1:], state=output.state, use_cache=True)
    mine = ours.generate(ids[:, :9], max_new_tokens=24, do_sample=False, pad_token_id=0, use_cache=True)
    assert torch.equal(mine, ids)


def test_weights_start_as_the_paper_says():
    """Decays from slow to fast, faster in between for later layers; mus from the token before to the present one."""
    model = LatteForCausalLM(preset("rwkv4", "tiny"))
    first, last = model.model.layers[0], model.model.layers[-1]
    D, i, l = 128, 40, 3
    for layer, depth in ((first, 0.0), (last, 1.0)):
        expected = -5 + 8 * (i / (D - 1)) ** (0.7 + 1.3 * depth)
        assert layer.mixer.time_decay[i].item() == pytest.approx(expected, rel=1e-5)
        assert layer.mixer.time_first[i].item() == pytest.approx(math.log(0.3) + 0.5 * ((i + 1) % 3 - 1))
    assert last.mixer.mu_k[i].item() == pytest.approx((i / D) ** (1 - l / 4))
    assert last.mixer.mu_v[i].item() == pytest.approx((i / D) ** (1 - l / 4) + 0.3)
    assert last.mixer.mu_r[i].item() == pytest.approx((i / D) ** (0.5 * (1 - l / 4)))
    assert last.mixer_2.mu_r[i].item() == pytest.approx((i / D) ** (1 - l / 4))
    assert first.mixer.mu_k[0].item() == 0
