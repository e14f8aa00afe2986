"""One token of an extended model in one native call, against its layers called one by one."""

from __future__ import annotations

import pytest
import torch

from latte.extend import convert
from latte.extend.families.qwen2 import Qwen2
from latte.models import LatteCache
from latte.ops import native
from tests.extend.families import FAMILIES, small_model
from tests.extend.test_convert import WAYS, ids, opened

pytestmark = pytest.mark.skipif(not native.available(), reason=native.describe())


@torch.no_grad()
def written(model, tokens: torch.Tensor, cache: LatteCache) -> torch.Tensor:
    return torch.cat([model(part, past_key_values=cache).logits for part in tokens.split(1, dim=1)], dim=1)


def compare(model, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same logits and states with the kernels and without."""
    cache = LatteCache()
    with torch.no_grad():
        model(ids(rows, 7), past_key_values=cache)
    other, tokens = cache.fork(), ids(rows, 12, seed=3)
    got = written(model, tokens, cache)
    monkeypatch.setenv("LATTE_BACKEND", "torch")
    wanted = written(model, tokens, other)
    monkeypatch.delenv("LATTE_BACKEND")
    scale = float(wanted.abs().max())
    torch.testing.assert_close(got, wanted, atol=2e-5 * scale, rtol=0)
    for (name, tensor), (_, expected) in zip(cache.state.tensors(), other.state.tensors(), strict=True):
        assert tensor.shape == expected.shape, name
        if not (
            "keys_B" in name or "values_B" in name
        ):  # slots not in use may hold anything; the logits show the others
            torch.testing.assert_close(tensor, expected, atol=1e-3, rtol=1e-4, msg=name)


def served(model) -> bool:
    """Whether one native call stands for the layers: of families with a shape, if scores are known when read."""
    wanted = model.family.shape is not None and model.config.options.get("received") is None
    assert (model.decode_refusal() is None) == wanted
    return wanted


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_states_are_those_of_the_layers(family, way, rows, monkeypatch, calls):
    model = opened(convert(small_model(family), WAYS[way])).eval()
    compare(model, rows, monkeypatch)
    assert len(calls) == (12 if served(model) else 0)


def test_a_family_without_a_shape_is_read_layer_by_layer(monkeypatch, calls):
    monkeypatch.setattr(Qwen2, "shape", None)
    model = opened(convert(small_model("qwen2"), WAYS[0])).eval()
    compare(model, 2, monkeypatch)
    assert not calls
    assert model.decode_refusal() == "family Qwen2 has no stages"


@pytest.mark.parametrize("family", FAMILIES)
def test_two_hundred_tokens_and_greedy_text(family, monkeypatch, calls):
    model = opened(convert(small_model(family), WAYS[0])).eval()
    settings = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None}
    found = model.generate(ids(1, 7), **settings)
    assert len(calls) == (199 if served(model) else 0)
    monkeypatch.setenv("LATTE_BACKEND", "torch")
    assert torch.equal(model.generate(ids(1, 7), **settings), found)


def test_what_is_changed_or_watched_is_seen(monkeypatch, calls):
    model = opened(convert(small_model("llama"), WAYS[0])).eval()
    compare(model, 1, monkeypatch)
    assert len(calls) == 12
    with torch.no_grad():
        model.base.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.randn(48, 32))
    compare(model, 1, monkeypatch)
    assert len(calls) == 24
    seen = []
    handle = model.base.model.layers[2].mlp.register_forward_hook(lambda *_: seen.append(1))
    compare(model, 1, monkeypatch)
    handle.remove()
    assert len(calls) == 24
    assert len(seen) == 1 + 12 + 12
    seen.clear()
    handle = model.get_output_embeddings().register_forward_hook(lambda *_: seen.append(1))
    compare(model, 1, monkeypatch)
    handle.remove()
    assert len(calls) == 36  # the layers are still served
    assert len(seen) == 1 + 12 + 12
    model.base.model.layers[0].mlp.act_fn = torch.nn.GELU()
    compare(model, 1, monkeypatch)
    assert len(calls) == 36


@torch.no_grad()
def test_a_call_that_fails_in_the_last_norm_reads_nothing(monkeypatch):
    model, cache = opened(convert(small_model("llama"), WAYS[0])).eval(), LatteCache()
    model(ids(1, 7), past_key_values=cache)

    def fail(*_):
        raise RuntimeError("stop")

    handle = model.base.model.norm.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        model(ids(1, 1), past_key_values=cache)
    handle.remove()
    assert cache.length == 7
