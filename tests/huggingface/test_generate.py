"""generate: continued, assisted, chunked and from embeddings; caches that are saved and cut back."""

from __future__ import annotations

import pytest
import torch

from latte.models import LatteCache
from tests.huggingface.support import each_kind, language_model
from tests.models.support import tiny_model, token_ids

GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@each_kind
@pytest.mark.parametrize("way", ["documents", "padding"])
@torch.no_grad()
def test_a_saved_cache_keeps_its_length(kind, way, tmp_path):
    """generate skips as many of the ids it is given as the cache has columns."""
    model, ids = language_model(kind), token_ids(2, 9, vocabulary=61)
    given = {"attention_mask": torch.ones_like(ids)}
    if way == "documents":
        given["reset"] = torch.zeros_like(ids, dtype=torch.bool)
        given["reset"][:, 5] = True
    else:
        given["attention_mask"][:, :3] = 0
    cache = model(ids, **given, use_cache=True).past_key_values
    cache.save(tmp_path / "cache.safetensors")
    loaded = LatteCache.load(tmp_path / "cache.safetensors")
    assert loaded.get_seq_length() == cache.get_seq_length() == 9
    longer = torch.cat([ids, token_ids(2, 1, vocabulary=61)], dim=1)
    mask = torch.cat([given["attention_mask"], torch.ones(2, 1, dtype=torch.long)], dim=1)
    found, wanted = (
        model.generate(longer, attention_mask=mask, past_key_values=c, **GREEDY) for c in (loaded, cache.fork())
    )
    assert torch.equal(found, wanted)


@each_kind
@torch.no_grad()
def test_a_draft_model_and_prompt_lookup_change_no_token(kind):
    model, ids = language_model(kind), token_ids(1, 9, vocabulary=61)
    draft = language_model(kind)
    for parameter in draft.parameters():
        parameter.add_(0.02 * torch.randn_like(parameter))
    wanted = model.generate(ids, **GREEDY)
    assert torch.equal(model.generate(ids, assistant_model=draft, **GREEDY), wanted)
    repeated = ids.repeat(1, 3)
    found = model.generate(repeated, prompt_lookup_num_tokens=3, **GREEDY)
    assert torch.equal(found, model.generate(repeated, **GREEDY))


@each_kind
@torch.no_grad()
def test_crop_takes_back_what_was_recorded(kind):
    model, ids = language_model(kind), token_ids(2, 9, vocabulary=61)
    cache = model(ids[:, :2], use_cache=True).past_key_values
    cache.activate_past_recording()
    model(ids[:, 2:6], past_key_values=cache)
    for token in ids[:, 6:].split(1, dim=1):
        model(token, past_key_values=cache)
    cache.crop(-5)  # three calls of one token, and half of the call of four
    assert cache.get_seq_length() == 4
    found = model(ids[:, 4:], past_key_values=cache).logits
    torch.testing.assert_close(found, model(ids).logits[:, 4:], rtol=0, atol=2e-5)
    cache.crop(0)
    with pytest.raises(ValueError, match="2 tokens can't be taken out of a recurrent state, 0 were recorded"):
        cache.crop(-2)
    with pytest.raises(ValueError, match="takes back 3 tokens, expected a negative number"):
        cache.crop(3)


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.rollback((None, 0)),
        lambda cache: cache.reset(),
    ],
    ids=["reorder", "select", "repeat", "rollback", "reset"],
)
def test_what_was_recorded_of_other_rows_or_moments_is_not_taken_back(change):
    model, ids = language_model("own"), token_ids(2, 9)
    cache = LatteCache()
    cache.activate_past_recording()
    model(ids, past_key_values=cache)
    change(cache)
    with pytest.raises(ValueError, match="1 tokens can't be taken out of a recurrent state, 0 were recorded"):
        cache.crop(-1)


@each_kind
@torch.no_grad()
def test_generation_goes_on_from_a_cache_and_from_embeddings(kind):
    model, ids = language_model(kind), token_ids(2, 9, vocabulary=61)
    whole = model.generate(ids, **GREEDY)
    half = model.generate(ids, **{**GREEDY, "max_new_tokens": 5}, return_dict_in_generate=True)
    rest = {**GREEDY, "max_new_tokens": 7}
    assert torch.equal(model.generate(half.sequences, past_key_values=half.past_key_values, **rest), whole)
    embedded = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embedded, **GREEDY), whole[:, 9:])
    assert torch.equal(model.generate(ids, inputs_embeds=embedded, **GREEDY), whole)


@each_kind
@torch.no_grad()
def test_a_long_prompt_is_read_in_chunks(kind):
    model, ids = language_model(kind), token_ids(2, 23, vocabulary=61)
    assert torch.equal(model.generate(ids, prefill_chunk_size=5, **GREEDY), model.generate(ids, **GREEDY))


@each_kind
def test_hidden_states_of_generation_are_given(kind):
    model, ids = language_model(kind), token_ids(2, 5, vocabulary=61)
    found = model.generate(ids, **GREEDY, output_hidden_states=True, return_dict_in_generate=True)
    assert len(found.hidden_states) == 12
    assert {states[-1].shape[1] for states in found.hidden_states[1:]} == {1}


STRATEGIES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9},
    "beams": {"num_beams": 3, "length_penalty": 0.5},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "several texts": {"do_sample": True, "num_return_sequences": 3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "guidance": {"guidance_scale": 1.5},
}


@each_kind
@pytest.mark.parametrize("strategy", STRATEGIES)
@torch.no_grad()
def test_a_strategy_writes_the_same_text_without_a_cache(kind, strategy):
    model, ids = language_model(kind), token_ids(2, 9, vocabulary=61)
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        texts.append(model.generate(ids, **{**GREEDY, **STRATEGIES[strategy]}, use_cache=use_cache))
    assert texts[0].shape == (2 * STRATEGIES[strategy].get("num_return_sequences", 1), 9 + 12)
    assert torch.equal(*texts)


def test_caches_of_another_kind_are_refused():
    model, ids = tiny_model("latte++"), token_ids(1, 5)
    with pytest.raises(ValueError, match="cache_implementation is 'static', expected None"):
        model.generate(ids, cache_implementation="static", **GREEDY)
    with pytest.raises(ValueError, match="cache_implementation is 'quantized', expected None"):
        model.generate(ids, cache_implementation="quantized", **GREEDY)


@each_kind
def test_gradients_of_hidden_states_can_be_retained(kind):
    model, ids = language_model(kind).train(), token_ids(2, 5, vocabulary=61)
    found = model(ids, output_hidden_states=True)
    for states in found.hidden_states:
        states.retain_grad()
    found.logits.sum().backward()
    assert all(states.grad is not None for states in found.hidden_states)


@each_kind
def test_the_vocabulary_can_be_resized(kind):
    model, ids = language_model(kind), token_ids(2, 5, vocabulary=61)
    before = model.get_input_embeddings().weight.shape[0]
    old = model(ids).logits
    model.resize_token_embeddings(before + 3)
    assert model.config.vocab_size == before + 3
    torch.testing.assert_close(model(ids).logits[..., :before], old)
    assert model(ids + 3 + before - 61 - 2, labels=ids).loss.isfinite()
