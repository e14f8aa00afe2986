"""The language model: reading in one go or in parts, padding, packing, the loss, saving and loading."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from latte.models import LatteCache, LatteConfig, LatteForCausalLM
from latte.models import loss as loss_module
from tests.models.support import VARIANTS, tiny_model, token_ids


@pytest.mark.parametrize("variant", VARIANTS)
def test_reading_in_parts_gives_the_logits_of_one_pass(variant):
    model, ids = tiny_model(variant).double(), token_ids(2, 40)
    whole = model(ids).logits
    cache, parts = LatteCache(), []
    for part in ids.split([1, 7, 1, 20, 11], dim=1):
        parts.append(model(part, past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-10)
    assert cache.get_seq_length() == 40


@pytest.mark.parametrize("variant", VARIANTS)
def test_padding_anywhere_changes_nothing(variant):
    model = tiny_model(variant).double()
    ids = token_ids(1, 12)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0]])
    padded = model(ids, attention_mask=mask).logits[mask.bool()]
    alone = model(ids[mask.bool()][None]).logits[0]
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_read_and_lose_as_they_do_alone(variant):
    model = tiny_model(variant).double()
    first, second = token_ids(1, 9, seed=2), token_ids(1, 14, seed=3)
    packed = torch.cat([first, second], dim=1)
    reset = torch.zeros(1, 23, dtype=torch.bool)
    reset[0, [0, 9]] = True
    together = model(packed, reset=reset).logits
    alone = torch.cat([model(first).logits, model(second).logits], dim=1)
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-10)
    losses = [model(ids, labels=ids).loss * (ids.shape[1] - 1) for ids in (first, second)]
    torch.testing.assert_close(model(packed, labels=packed, reset=reset).loss, sum(losses) / 21)


def test_transformer_is_llama_given_its_weights():
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
    )
    torch.manual_seed(0)
    llama = LlamaForCausalLM(config).eval()
    ours = tiny_model("transformer++", num_key_value_heads=2)
    names = {
        "self_attn": "mixer",
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "mlp_norm",
    }
    weights = {}
    for name, tensor in llama.state_dict().items():
        for theirs, own in names.items():
            name = name.replace(theirs, own)
        weights[name] = tensor
    ours.load_state_dict(weights)
    ids = token_ids(3, 50)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, llama(ids).logits, rtol=0, atol=1e-5)
        mask = torch.ones(3, 50, dtype=torch.long)
        mask[0, :17] = 0
        theirs = llama(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
        difference = (ours(ids, attention_mask=mask).logits - theirs)[mask.bool()].abs().max()
    assert difference < 1e-5


def test_loss_is_the_cross_entropy_of_the_logits_and_so_is_its_gradient(monkeypatch):
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", 97 * 5)  # several blocks, the last one ragged
    model, ids = tiny_model("latte-conv-swa++").double().train(), token_ids(2, 23)
    labels = ids.clone()
    labels[0, 3:9] = -100
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    model(ids, attention_mask=mask, labels=labels).loss.backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    ours = model(ids, attention_mask=mask, labels=labels)
    assert ours.logits is None
    model.zero_grad()
    logits = model(ids, attention_mask=mask).logits[:, :-1]
    targets = labels[:, 1:].clone()
    targets[1, :4] = -100  # padding, and the first real token, which nothing predicts
    wanted = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    wanted.backward()
    torch.testing.assert_close(ours.loss, wanted)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, msg=name)


def test_loss_holds_no_more_logits_than_it_is_allowed(monkeypatch):
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", 97 * 4)
    largest = 0
    original = F.nll_loss

    def watch(logits, *arguments, **keywords):
        nonlocal largest
        largest = max(largest, logits.numel())
        return original(logits, *arguments, **keywords)

    monkeypatch.setattr(F, "nll_loss", watch)
    model, ids = tiny_model("latte++").train(), token_ids(2, 30)
    model(ids, labels=ids).loss.backward()
    assert 0 < largest <= 97 * 4


def test_loss_of_parts_adds_up_to_that_of_the_batch():
    model, ids = tiny_model("latte-r-swa++").double(), token_ids(4, 11)
    whole = model(ids, labels=ids).loss
    parts = [model(part, labels=part, num_items_in_batch=40).loss for part in ids.split(2)]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_through_the_auto_classes_is_bitwise(variant, tmp_path):
    model, ids = tiny_model(variant), token_ids(2, 30)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LatteForCausalLM
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert not list(tmp_path.glob("*.bin"))


def test_layers_may_have_different_mixers(tmp_path):
    layers = [
        {"mixer": "latte", "options": {"num_latents": 8, "feed": "conv", "window": 3}},
        {"mixer": "gla"},
        {"mixer": "softmax"},
    ]
    config = LatteConfig(vocab_size=97, hidden_size=32, num_hidden_layers=3, layer_mixers=layers, intermediate_size=64)
    model, ids = LatteForCausalLM(config).eval(), token_ids(2, 20)
    assert [block.mixer.name for block in model.model.layers] == ["latte", "gla", "softmax"]
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("variant", ["latte", "latte-r-swa++", "transformer++"])
def test_gradient_checkpointing_changes_no_gradient(variant):
    ids = token_ids(2, 20)
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model(variant).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(ids, labels=ids).loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_compiled_without_a_break():
    model, ids = tiny_model("latte-r-swa++"), token_ids(2, 20)
    compiled = torch.compile(model.model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = compiled(input_ids=ids, use_cache=False).last_hidden_state
        wanted = model.model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, wanted)


def test_flops_of_attention_grow_with_the_context_and_those_of_latte_do_not():
    latte, transformer = tiny_model("latte-r-swa++"), tiny_model("transformer++")
    assert latte.flops_per_token(0) == latte.flops_per_token(100_000)
    assert transformer.flops_per_token(100_000) > transformer.flops_per_token(0)
    matrices = sum(w.numel() for n, w in transformer.named_parameters() if w.dim() > 1 and "embed" not in n)
    assert transformer.flops_per_token(0) == 2 * (matrices + transformer.lm_head.weight.numel())


class TestBadInput:
    def test_neither_ids_nor_embeddings(self):
        with pytest.raises(ValueError, match="expected exactly one"):
            tiny_model("latte++")()

    def test_mask_of_another_length(self):
        with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 5\), expected \(2, 8\)"):
            tiny_model("latte++")(token_ids(2, 8), attention_mask=torch.ones(2, 5))

    def test_reset_of_another_length(self):
        with pytest.raises(ValueError, match=r"reset has shape \(2, 5\), expected \(B=2, T=8\)"):
            tiny_model("latte++")(token_ids(2, 8), reset=torch.zeros(2, 5, dtype=torch.bool))

    def test_no_tokens(self):
        with pytest.raises(ValueError, match="empty"):
            tiny_model("latte-conv++")(token_ids(2, 0))

    def test_cache_of_another_batch(self):
        model = tiny_model("latte-r-swa++")
        cache = model(token_ids(2, 8)).past_key_values
        with pytest.raises(ValueError, match="the cache has 2 rows, expected 3"):
            model(token_ids(3, 1), past_key_values=cache)

    def test_cache_of_another_mixer(self):
        cache = tiny_model("latte-conv++")(token_ids(2, 8)).past_key_values
        with pytest.raises(ValueError, match="expected"):
            tiny_model("latte-r-swa++")(token_ids(2, 1), past_key_values=cache)

    def test_cache_of_another_depth(self):
        cache = tiny_model("latte-conv++", num_hidden_layers=1)(token_ids(2, 8)).past_key_values
        with pytest.raises(ValueError, match="states of 1 layers, expected 2"):
            tiny_model("latte-conv++")(token_ids(2, 1), past_key_values=cache)

    def test_document_beyond_the_learned_positions(self):
        model = tiny_model("latte")
        with pytest.raises(ValueError, match=r"reaches place 64, but learned positions end at .* \(64\)"):
            model(token_ids(1, 65))

    def test_unknown_block_mixer_option_and_positions(self):
        for settings, message in (
            ({"block": "+"}, "block is '\\+', expected one of plain, \\+\\+"),
            ({"mixer": "lattte"}, "unknown mixer 'lattte' \\(did you mean 'latte'"),
            ({"mixer_options": {"windw": 3}}, "no option 'windw' \\(did you mean 'window'"),
            ({"mixer_options": {"window": "3"}}, "option window is '3', expected int or None"),
            ({"position_embedding": "rotary"}, "position_embedding is 'rotary'"),
            ({"layer_mixers": [{"mixer": "gla"}]}, "layer_mixers has 1 entries, expected 4"),
            ({"layer_mixers": [{"name": "gla"}] * 4}, "expected 'mixer'"),
            ({"hidden_size": 30}, "hidden_size is 30, expected a positive multiple of num_heads"),
        ):
            with pytest.raises(ValueError, match=message):
                LatteConfig(**settings)

    def test_bidirectional_language_model(self):
        with pytest.raises(ValueError, match="must not see the future"):
            LatteForCausalLM(LatteConfig(bidirectional=True))

    def test_causal_mixer_asked_to_be_bidirectional(self):
        from latte.models import LatteForSequenceClassification

        with pytest.raises(ValueError, match="'gla' is causal only"):
            LatteForSequenceClassification(LatteConfig(bidirectional=True, mixer="gla"))
