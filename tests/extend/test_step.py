"""One token of an extended model in one native call, against its layers called one by one."""

from __future__ import annotations

import pytest
import torch

from latte.extend import convert
from latte.models import LatteCache
from latte.ops import native
from tests.extend.families import FAMILIES, small_model
from tests.extend.test_convert import WAYS, ids, opened

pytestmark = pytest.mark.skipif(not native.available(), reason=native.describe())
FITTING = [name for name in FAMILIES if name.startswith(("llama", "mistral"))]


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


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("family", FITTING)
def test_logits_and_states_are_those_of_the_layers(family, way, rows, monkeypatch, calls):
    compare(opened(convert(small_model(family), WAYS[way])).eval(), rows, monkeypatch)
    assert len(calls) == 12


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in FITTING])
def test_other_families_are_read_layer_by_layer(family, monkeypatch, calls):
    compare(opened(convert(small_model(family), WAYS[0])).eval(), 2, monkeypatch)
    assert not calls


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
