"""Tokens kept behind a window in the decode engine, against the modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from latte.models import LatteCache, LatteForCausalLM
from latte.ops import native
from tests.models.support import both_ways, decode, tiny_config, token_ids

pytestmark = pytest.mark.skipif(not native.available(), reason=native.describe())

#: With lifetimes, a reach that tokens leave, nothing in the window, scores that count in logits.
KEPT: dict[str, dict[str, Any]] = {
    "few": {"window": 4, "kept": 3},
    "lifetimes": {"window": 5, "sinks": 2, "kept": 6, "recall": True, "coupled": True},
    "reach": {"window": 4, "sinks": 1, "kept": 5, "reach": 12, "recall": True},
    "no window": {"window": 0, "kept": 7, "softcap": 4.0, "score_weight": 0.3},
    "no rotary": {"window": 3, "kept": 4, "rope": False, "score_weight": -0.2},
    "many": {"window": 6, "sinks": 3, "kept": 40, "reach": 30, "coupled": True, "score_weight": 0.5, "recall": True},
}


def model_of(name: str, dtype: torch.dtype = torch.float32, **fields: Any) -> LatteForCausalLM:
    config = tiny_config("latte-r-swa++", initializer_range=0.2, **fields)
    config.mixer_options = {**config.mixer_options, **KEPT[name]}
    torch.manual_seed(0)
    model = LatteForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("score_recency", "lifetime_bias", "recall_level")):
                parameter.copy_(torch.rand_like(parameter) * (30.0 if "recency" in parameter_name else 1.0))
    return model


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_and_states_are_those_of_the_modules(name, dtype, monkeypatch, calls):
    model = model_of(name, dtype, num_key_value_heads=2 if name in ("lifetimes", "many") else 4)
    with torch.no_grad():
        cache = model(token_ids(2, 9)).past_key_values
    got, wanted, after, expected = both_ways(model, token_ids(2, 60, seed=4), cache, monkeypatch)
    assert len(calls) == 60
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(got, wanted, atol=tolerance * float(wanted.abs().max()), rtol=0)
    for (path, tensor), (_, other) in zip(after.state.tensors(), expected.state.tensors(), strict=True):
        if tensor.is_floating_point():
            how = {"atol": 10 * tolerance, "rtol": 10 * tolerance, "msg": lambda text, path=path: f"{path}: {text}"}
            torch.testing.assert_close(tensor, other, **how)
        else:
            assert torch.equal(tensor, other), path


@torch.no_grad()
@pytest.mark.parametrize("name", ["lifetimes", "reach", "no window"])
def test_states_are_values(name, tmp_path, calls):
    """Fork, save, select, and several tokens in one call that are taken back, all in the same bits."""
    model, ids = model_of(name), token_ids(3, 30, seed=2)
    cache = model(token_ids(3, 8)).past_key_values
    decode(model, ids[:, :2], cache)
    moment, twin = cache.snapshot(), cache.fork()
    first = decode(model, ids, cache)
    cache.rollback(moment)
    cache.save(tmp_path / "state.safetensors")
    for other in (twin, LatteCache.load(tmp_path / "state.safetensors")):
        assert torch.equal(decode(model, ids, other), first)
    index = torch.tensor([2, 0, 0])
    assert torch.equal(decode(model, ids[index], LatteCache(*moment).select(index)), first[index])
    together = torch.cat([model.decode_each(part, cache) for part in ids.split(10, dim=1)], dim=1)
    assert torch.equal(together, first)
    assert cache.take_back(7)
    assert torch.equal(decode(model, ids[:, 23:], cache), first[:, 23:])


@torch.no_grad()
def test_rows_of_different_lengths_decode_as_each_alone(calls):
    model = model_of("many")
    prompts, following = [token_ids(1, n, seed=n) for n in (3, 50)], token_ids(2, 20, seed=8)
    ids, mask = torch.zeros(2, 50, dtype=torch.long), torch.zeros(2, 50, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 50 - prompt.shape[1] :], mask[row, 50 - prompt.shape[1] :] = prompt[0], 1
    together = decode(model, following, model(ids, attention_mask=mask).past_key_values)
    for row, prompt in enumerate(prompts):
        alone = decode(model, following[row : row + 1], model(prompt).past_key_values)
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-4, rtol=1e-5)
    assert len(calls) == 60


def test_scores_by_attention_received_are_refused_in_a_sentence():
    config = tiny_config("latte-r-swa++")
    config.mixer_options = {**config.mixer_options, "kept": 3, "received": 0.5}
    refusal = LatteForCausalLM(config).eval().decode_refusal()
    assert refusal == "scores by attention received in the window have no stages"
