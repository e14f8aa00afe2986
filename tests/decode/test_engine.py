"""The decode engine over many tokens, and why it does not serve a model."""

from __future__ import annotations

import logging

import pytest
import torch

from latte.decode.stages import STAGES
from latte.mixers import Mixer, mixer_class
from latte.mixers.latte import LatteMixer
from latte.models import LatteCache
from latte.models.presets import variants
from latte.ops import native
from tests.models.support import both_ways, decode, tiny_model, token_ids

pytestmark = pytest.mark.skipif(not native.available(), reason=native.describe())

#: Presets whose mixers have stages.
SERVED = [name for name, (mixer, _) in variants().items() if mixer.name in STAGES]
GROWING = [name for name in SERVED if tiny_model(name).model.layers[0].mixer.growth == "linear"]


@pytest.mark.parametrize("variant", SERVED)
def test_two_hundred_tokens(variant, monkeypatch, calls):
    model = tiny_model(variant, max_position_embeddings=300)
    with torch.no_grad():
        cache = model(token_ids(2, 11)).past_key_values
    got, wanted, after, expected = both_ways(model, token_ids(2, 200, seed=4), cache, monkeypatch)
    assert len(calls) == 200
    torch.testing.assert_close(got, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)
    assert after.length == expected.length == 211
    assert after.nbytes == expected.nbytes


@pytest.mark.parametrize("variant", SERVED)
def test_greedy_text_is_the_same(variant, monkeypatch, calls):
    model, ids = tiny_model(variant, max_position_embeddings=300), token_ids(1, 6)
    settings = {"max_new_tokens": 200, "do_sample": False, "pad_token_id": 0}
    found = model.generate(ids, **settings)
    assert len(calls) == 199
    monkeypatch.setenv("LATTE_BACKEND", "torch")
    assert torch.equal(model.generate(ids, **settings), found)


@torch.no_grad()
@pytest.mark.parametrize("variant", GROWING)
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_long_rows_are_cut_in_parts_and_memory_grows(variant, kv_heads, monkeypatch, calls):
    """Behind 200 to 700 tokens: from one part to several, and past the memory that a session starts with."""
    model = tiny_model(variant, num_key_value_heads=kv_heads, max_position_embeddings=2000)
    for read in (200, 700):
        cache = model(token_ids(2, read)).past_key_values
        got, wanted, *_ = both_ways(model, token_ids(2, 120, seed=4), cache, monkeypatch)
        torch.testing.assert_close(got, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)
        alone = model(token_ids(2, read)[:1]).past_key_values
        other = decode(model, token_ids(2, 120, seed=4)[:1], alone)
        torch.testing.assert_close(other, got[:1], atol=1e-5 * float(wanted.abs().max()), rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("variant", SERVED)
def test_left_padded_rows_decode_as_each_alone(variant, calls):
    model = tiny_model(variant, max_position_embeddings=400)
    prompts, following = [token_ids(1, n, seed=n) for n in (3, 290)], token_ids(2, 6, seed=8)
    ids, mask = torch.zeros(2, 290, dtype=torch.long), torch.zeros(2, 290, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 290 - prompt.shape[1] :], mask[row, 290 - prompt.shape[1] :] = prompt[0], 1
    cache = model(ids, attention_mask=mask).past_key_values
    together = decode(model, following, cache)
    assert cache.state.count_B.tolist() == [9, 296]
    again = decode(model, following, LatteCache(cache.state, cache.length))  # what was read as a value, read on
    for row, prompt in enumerate(prompts):
        own = model(prompt).past_key_values
        alone = decode(model, following[row : row + 1], own)
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-4, rtol=1e-5)
        torch.testing.assert_close(
            again[row : row + 1], decode(model, following[row : row + 1], own), atol=1e-4, rtol=1e-5
        )
    assert len(calls) == 36


@torch.no_grad()
@pytest.mark.parametrize("variant", SERVED)
def test_states_are_values(variant, tmp_path, calls):
    """Fork, select, roll back, save, and several tokens in one call that are taken back, all in the same bits."""
    model, ids = tiny_model(variant, max_position_embeddings=99), token_ids(3, 9, seed=2)
    cache = model(token_ids(3, 8)).past_key_values
    decode(model, ids[:, :2], cache)
    moment, kept = cache.snapshot(), cache.fork()
    first = decode(model, ids, cache)
    cache.rollback(moment)
    for (name, tensor), (_, other) in zip(cache.state.tensors(), kept.state.tensors(), strict=True):
        assert torch.equal(tensor, other), name
    cache.save(tmp_path / "state.safetensors")
    for twin in (cache, kept, LatteCache.load(tmp_path / "state.safetensors")):
        assert torch.equal(decode(model, ids, twin), first)
    index = torch.tensor([2, 0, 0])
    assert torch.equal(decode(model, ids[index], LatteCache(*moment).select(index)), first[index])
    cache.rollback(moment)
    together = model.decode_each(ids, cache)
    assert torch.equal(together, first)
    assert cache.take_back(4)
    assert torch.equal(decode(model, ids[:, 5:], cache), first[:, 5:])


@pytest.mark.parametrize("variant", SERVED)
def test_beams(variant, monkeypatch, calls):
    model, ids = tiny_model(variant, max_position_embeddings=99), token_ids(2, 6)
    settings = {"max_new_tokens": 20, "do_sample": False, "num_beams": 3, "pad_token_id": 0}
    found = model.generate(ids, **settings)
    assert len(calls) == 19
    monkeypatch.setenv("LATTE_BACKEND", "torch")
    assert torch.equal(model.generate(ids, **settings), found)


@torch.no_grad()
def test_a_model_without_stages_is_refused_once_and_says_why(monkeypatch, caplog, calls):
    name = "gla"
    monkeypatch.delitem(STAGES, name)
    model, ids = tiny_model(name), token_ids(1, 5)
    compiled = []
    from latte.decode import engine

    original = engine.compile_model
    monkeypatch.setattr(engine, "compile_model", lambda *given: compiled.append(1) or original(*given))
    with caplog.at_level(logging.INFO, logger="latte.decode"):
        cache = model(ids).past_key_values
        decode(model, ids, cache)
        decode(model, ids, cache)
    assert not calls
    assert len(compiled) == 2  # from ids, and from embedded tokens
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"tokens are read by torch's modules, layer by layer: mixer {name!r} has no stages"]
    assert model.decode_refusal() == f"mixer {name!r} has no stages"


class Slower(LatteMixer):
    """A mixer of a user's own, under a registered name."""


@torch.no_grad()
def test_a_mixer_of_ones_own_is_called_and_a_change_is_seen(monkeypatch, calls):
    model, ids = tiny_model("latte-r-swa++"), token_ids(1, 4)
    assert model.decode_refusal() is None
    cache = model(ids).past_key_values
    wanted = decode(model, ids, cache.fork())
    mixer = model.model.layers[1].mixer
    mixer.__class__ = Slower
    calls.clear()
    torch.testing.assert_close(decode(model, ids, cache.fork()), wanted, atol=1e-5, rtol=1e-5)
    assert not calls
    assert "Slower" in model.decode_refusal()
    mixer.__class__ = LatteMixer  # and back again
    assert torch.equal(decode(model, ids, cache.fork()), wanted)
    norm = model.model.layers[0].mixer_norm
    model.model.layers[0].mixer_norm = torch.nn.Identity()
    assert model.decode_refusal() == "a norm is a Identity"
    model.model.layers[0].mixer_norm = norm
    assert model.decode_refusal() is None


@torch.no_grad()
def test_a_state_that_no_stage_keeps_is_refused(monkeypatch):
    """A new part of a mixer's state must not be dropped silently."""
    monkeypatch.setitem(STAGES, "softmax", lambda b, at, x, out: None)
    why = tiny_model("transformer++").decode_refusal()
    assert why == "the stages of mixer 'softmax' do not keep keys_BSGK, live_BS, values_BSGV"


@torch.no_grad()
def test_learned_positions_end(calls):
    model = tiny_model("latte++", max_position_embeddings=8)
    cache = model(token_ids(1, 6)).past_key_values
    decode(model, token_ids(1, 2), cache)
    assert len(calls) == 2
    with pytest.raises(ValueError, match="learned positions end"):
        decode(model, token_ids(1, 1), cache)


@torch.no_grad()
def test_the_last_block_of_a_state_ends_a_document(calls):
    model = tiny_model("log-linear-mamba2", max_levels=4)
    cache = model(token_ids(1, 5)).past_key_values
    decode(model, token_ids(1, 3), cache)
    assert len(calls) == 3
    with pytest.raises(ValueError, match="a document has 9 tokens, expected at most 8"):
        decode(model, token_ids(1, 1), cache)


@torch.no_grad()
def test_a_state_without_the_blocks_of_its_tokens_is_refused():
    model = tiny_model("log-linear-mamba2")
    cache = model(token_ids(1, 5)).past_key_values
    few = cache.state.map(lambda x: x[:, :2] if x.dim() == 5 else x)
    with pytest.raises(ValueError, match="state has 2 levels, expected at least 3 after 5 tokens"):
        decode(model, token_ids(1, 1), LatteCache(few, cache.length))


def test_every_described_mixer_exists():
    for name in STAGES.keys() - {"extended"}:
        assert issubclass(mixer_class(name), Mixer)
