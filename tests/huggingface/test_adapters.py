"""peft's methods and torch's int8 on our models: what trains and generates, and what is refused."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig

from latte.models import LatteCache
from tests.huggingface.support import each_kind, language_model
from tests.models.support import both_ways, decode, token_ids

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # peft's and torch's own

PROJECTIONS = ["v_proj", "o_proj", "up_proj", "down_proj"]
LANGUAGE = {"task_type": "CAUSAL_LM"}
METHODS = {
    "LoRA": lambda: peft.LoraConfig(target_modules="all-linear", **LANGUAGE),
    "rsLoRA": lambda: peft.LoraConfig(target_modules="all-linear", use_rslora=True, **LANGUAGE),
    "DoRA": lambda: peft.LoraConfig(target_modules="all-linear", use_dora=True, **LANGUAGE),
    "IA3": lambda: peft.IA3Config(target_modules=PROJECTIONS, feedforward_modules=["down_proj"], **LANGUAGE),
    "LoHa": lambda: peft.LoHaConfig(target_modules=PROJECTIONS),
    "LoKr": lambda: peft.LoKrConfig(target_modules=PROJECTIONS),
    "VeRA": lambda: peft.VeraConfig(target_modules=["v_proj", "o_proj"]),
    "norm tuning": lambda: peft.LNTuningConfig(target_modules=["norm"], **LANGUAGE),
    "trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 2, 3, 5, 8], **LANGUAGE),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **LANGUAGE),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **LANGUAGE),
}


def greedy_agrees(model, ids):
    """Whether each generated token is the likeliest one of the model that reads everything at once."""
    text = model.generate(input_ids=ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    whole = model(input_ids=text, use_cache=False).logits[:, -5:-1].argmax(dim=-1)
    return torch.equal(text[:, -4:], whole)


@each_kind
@pytest.mark.parametrize("method", METHODS)
def test_a_method_of_peft_trains_its_own_weights_alone_and_generates(kind, method):
    torch.manual_seed(0)
    model, ids = language_model(kind), token_ids(2, 9, vocabulary=61)
    adapted = peft.get_peft_model(model, METHODS[method]()).train()
    frozen = {name: p.detach().clone() for name, p in adapted.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(6):
        loss = adapted(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, frozen[name]) for name, p in adapted.named_parameters() if name in frozen)
    with torch.no_grad():
        assert greedy_agrees(adapted.eval(), ids)


@each_kind
def test_prefix_tuning_is_refused_in_one_sentence(kind):
    """It writes keys and values into a cache, where these models keep states."""
    ids = token_ids(2, 9, vocabulary=61)
    tuned = peft.get_peft_model(language_model(kind), peft.PrefixTuningConfig(num_virtual_tokens=3, **LANGUAGE))
    sentence = "expected a LatteCache or None: the layers keep states of one size instead of keys and values"
    for call in (lambda: tuned(ids), lambda: tuned.generate(input_ids=ids, max_new_tokens=2)):
        with pytest.raises(ValueError, match=f"past_key_values is a DynamicCache, {sentence}"):
            call()


@each_kind
@torch.no_grad()
def test_dynamic_int8_replaces_plain_linear_layers_and_decoding_uses_them(kind, monkeypatch):
    """torch goes by the exact class: layers of our own classes stay as they are.

    The scale of activations is that of a call, so tokens one by one are compared with the same without kernels.
    """
    model, ids = language_model(kind), token_ids(2, 9, vocabulary=61)
    before = decode(model, ids, LatteCache())
    plain = sum(type(module) is nn.Linear for module in model.modules())
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert sum(type(module) is torch.ao.nn.quantized.dynamic.Linear for module in quantised.modules()) == plain
    assert plain == (6 if kind == "own" else 0)  # the MLPs of two layers
    found, wanted, *_ = both_ways(quantised, ids, LatteCache(), monkeypatch)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    difference = (found - before).abs().max()
    assert 0 < difference < 0.1 * before.abs().max() if plain else difference == 0


LIBRARIES = {
    "bitsandbytes": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "optimum.quanto": lambda: QuantoConfig(weights="int8"),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_quantisation_by_a_library_that_is_not_there_names_it(library, tmp_path):
    if importlib.util.find_spec(library.partition(".")[0]) is not None:
        pytest.skip(f"{library} is installed")
    language_model("own").save_pretrained(tmp_path)
    with pytest.raises(ImportError, match=library.replace(".", "[.-]")):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=LIBRARIES[library]())
