"""What collators and tools pass beside the ids: honoured, or refused in one sentence; never ignored."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, DynamicCache

from latte.models import LatteCache
from tests.huggingface.support import each_kind, language_model
from tests.models.support import tiny_model, token_ids

LENGTHS = (5, 1, 9, 4)


def documents():
    return [token_ids(1, length, seed=length, vocabulary=61)[0] for length in LENGTHS]


@each_kind
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"return_flash_attn_kwargs": True},
        {"return_seq_idx": True},
        {"return_position_ids": False, "return_seq_idx": True},
        {"return_position_ids": False, "return_flash_attn_kwargs": True},
    ],
    ids=lambda given: " ".join(given) or "position_ids",
)
@torch.no_grad()
def test_rows_of_a_flattening_collator_give_what_each_document_gives_alone(kind, given):
    model = language_model(kind)
    batch = DataCollatorWithFlattening(return_tensors="pt", **given)([{"input_ids": ids} for ids in documents()])
    found = model(**batch)
    alone = torch.cat([model(ids[None], use_cache=False).logits for ids in documents()], dim=1)
    torch.testing.assert_close(found.logits, alone, rtol=0, atol=2e-5)
    single = [model(ids[None], labels=ids[None]).loss * (len(ids) - 1) for ids in documents() if len(ids) > 1]
    torch.testing.assert_close(found.loss, sum(single) / (sum(LENGTHS) - len(LENGTHS)), rtol=1e-5, atol=1e-5)


@each_kind
@torch.no_grad()
def test_positions_that_say_what_is_so_change_nothing(kind):
    model, ids = language_model(kind), token_ids(2, 9, vocabulary=61)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    places = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)  # as transformers writes them
    cache, other = LatteCache(), LatteCache()
    found = model(ids, attention_mask=mask, position_ids=places, past_key_values=cache).logits
    assert torch.equal(found, model(ids, attention_mask=mask, past_key_values=other).logits)
    step = {"input_ids": ids[:, :1], "attention_mask": torch.cat([mask, mask[:, -1:]], dim=1)}
    found = model(**step, position_ids=places[:, -1:] + 1, past_key_values=cache).logits
    torch.testing.assert_close(found, model(**step, past_key_values=other).logits)


@each_kind
@torch.no_grad()
def test_position_zero_behind_a_cache_begins_a_document(kind):
    model, ids = language_model(kind), token_ids(1, 6, vocabulary=61)
    cache = model(ids, use_cache=True).past_key_values
    found = model(ids, position_ids=torch.arange(6), past_key_values=cache).logits
    torch.testing.assert_close(found, model(ids).logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"attention_maks": 1}, r"no argument 'attention_maks' \(did you mean 'attention_mask'\?\)"),
        ({"position_ids": torch.tensor([[0, 1, 2, 7, 8, 9]])}, "is 7 in row 0, column 3, expected 3 .* or 0"),
        ({"position_ids": torch.arange(6) + 2}, "is 2 in row 0, column 0, expected 0"),
        ({"position_ids": torch.zeros(1, 4, dtype=torch.long)}, r"shape \(1, 4\), expected \(1, 6\)"),
        ({"cu_seq_lens_q": torch.tensor([0, 3])}, "from 0 to the 6 tokens"),
        (
            {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]), "seq_idx": torch.tensor([[0, 0, 1, 1, 1, 1]])},
            "disagree whether a document begins in row 0, column 2",
        ),
        ({"token_type_ids": torch.tensor([[0, 0, 0, 1, 1, 1]])}, "one type of token"),
        ({"is_causal": False}, "is_causal is False, expected True"),
        ({"cache_position": torch.arange(3, 9)}, "expected 0 to 5"),
        ({"output_router_logits": True}, "no router"),
        ({"past_key_values": DynamicCache()}, "is a DynamicCache, expected a LatteCache or None"),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else None,
)
@each_kind
def test_what_can_not_be_honoured_is_refused(kind, given, sentence):
    model = language_model(kind)
    with pytest.raises(ValueError, match=sentence):
        model(token_ids(1, 6, vocabulary=61), **given)


@each_kind
@torch.no_grad()
def test_keywords_that_say_what_is_so_anyway_are_accepted(kind):
    model, ids = language_model(kind), token_ids(1, 6, vocabulary=61)
    known = {"token_type_ids": torch.zeros_like(ids), "is_causal": True, "cache_position": torch.arange(6)}
    assert torch.equal(model(ids, **known, output_router_logits=False).logits, model(ids).logits)


@each_kind
@torch.no_grad()
def test_tuples_hidden_states_and_weights_come_as_transformers_gives_them(kind):
    model, ids = language_model(kind), token_ids(2, 6, vocabulary=61)
    layers = model.config.num_hidden_layers
    found = model(ids, output_hidden_states=True, output_attentions=True)
    assert len(found.hidden_states) == layers + 1
    torch.testing.assert_close(model.logits(found.hidden_states[-1]), found.logits)
    assert len(found.attentions) == layers
    for weights in found.attentions:
        assert weights.shape[0], weights.shape[2:] == (2, 6, 6)
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        assert torch.equal(weights, weights.tril())
    first, cache = model(ids, return_dict=False)
    assert torch.equal(first, found.logits)
    with pytest.raises(ValueError, match="behind a cache"):
        model(ids, past_key_values=cache, output_attentions=True)
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == layers + 1


def test_weights_that_do_not_sum_to_one_are_not_given():
    with pytest.raises(ValueError, match="mixer 'gla' has no weights that sum to 1"):
        tiny_model("gla")(token_ids(1, 4), output_attentions=True)


@each_kind
@pytest.mark.parametrize("asked", [[0], (1, 0), {1}, "last"])
def test_hidden_states_of_chosen_layers_stand_in_their_places(kind, asked):
    """As transformers gives them: the output of layer i at place i, None for layers that were not chosen."""
    model, ids = language_model(kind), token_ids(2, 7, vocabulary=61)
    layers = model.config.num_hidden_layers
    asked = [layers - 1] if asked == "last" else asked
    every = model(ids, output_hidden_states=True).hidden_states
    found = model(ids, output_hidden_states=asked).hidden_states
    assert len(found) == layers
    for layer, states in enumerate(found):
        assert torch.equal(states, every[layer + 1]) if layer in asked else states is None


@each_kind
def test_hidden_states_of_layers_that_are_not_there_are_refused(kind):
    model, ids = language_model(kind), token_ids(2, 7, vocabulary=61)
    for unknown in (9, -1):
        with pytest.raises(ValueError, match=f"output_hidden_states has layer {unknown}, expected layers from 0 to"):
            model(ids, output_hidden_states=[0, unknown])


@each_kind
def test_an_attention_implementation_that_nothing_would_use_is_refused(kind, tmp_path):
    model = language_model(kind)
    model.set_attn_implementation("eager")
    for asked in ("sdpa", "flash_attention_2", {"": "sdpa"}):
        with pytest.raises(ValueError, match="expected 'eager' or None"):
            model.set_attn_implementation(asked)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"attn_implementation is 'sdpa', but Latte.* has no softmax attention"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").config.model_type
