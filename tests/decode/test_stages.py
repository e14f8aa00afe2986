"""The stages of every mixer that has some, through its examples: tokens, states and batches as in its modules."""

from __future__ import annotations

import pytest
import torch

from latte.decode.stages import STAGES
from latte.layers.config import MixerConfig
from latte.mixers import mixer_class
from latte.models import LatteCache, LatteConfig, LatteForCausalLM
from latte.ops import native
from latte.testing.cases import Case, D, H, cases
from tests.models.support import both_ways, decode, token_ids

pytestmark = pytest.mark.skipif(not native.available(), reason=native.describe())

SIZES = {"hidden_size": D, "num_heads": H, "intermediate_size": 20}
EXAMPLES = [
    case
    for name in sorted(STAGES.keys() - {"extended"})
    for case in cases(name)
    if not case.bidirectional and not dict(case.example).get("received")
]


def model_of(case: Case) -> LatteForCausalLM:
    """Two layers of an example in float64, parameters that start as 0 or alike moved away from there."""
    example = dict(case.example)
    fields = SIZES | {key: example.pop(key) for key in MixerConfig.__dataclass_fields__ if key in example}
    fields["num_attention_heads"] = fields.pop("num_heads")
    torch.manual_seed(0)
    config = LatteConfig(mixer=case.name, mixer_options=example, vocab_size=97, num_hidden_layers=2, **fields)
    model = LatteForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("case", EXAMPLES, ids=str)
def test_examples(case, monkeypatch, calls):
    """In float64, 32 rows: logits and states of the modules, and every row the bits that it has alone."""
    model, ids = model_of(case), token_ids(32, 7, seed=4)
    assert model.decode_refusal() is None
    with torch.no_grad():
        cache = model(token_ids(32, 5)).past_key_values
    alone = cache.select(torch.tensor([9]))
    got, wanted, after, expected = both_ways(model, ids, cache, monkeypatch)
    assert len(calls) == 7
    torch.testing.assert_close(got, wanted, atol=1e-10 * float(wanted.abs().max()), rtol=0)
    for (path, tensor), (_, other) in zip(after.state.tensors(), expected.state.tensors(), strict=True):
        torch.testing.assert_close(tensor, other, atol=1e-10, rtol=1e-10, msg=lambda text, path=path: f"{path}: {text}")
    assert torch.equal(decode(model, ids[9:10], alone), got[9:10])
    with torch.no_grad():
        again = model(ids[:, :1], past_key_values=LatteCache(after.state, after.length)).logits
        assert torch.equal(model(ids[:, :1], past_key_values=after).logits, again)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [None, 400])
@pytest.mark.parametrize("attention", ["softmax", "laplace"])
def test_mega_behind_many_tokens(attention, chunk, monkeypatch, calls):
    """Rows are cut in parts, and a run of tokens ends."""
    example = {"attention": attention, "chunk": chunk, "ema_size": 2, "key_width": 4}
    model = model_of(Case("mega", tuple(example.items())))
    cache = model(token_ids(2, 390)).past_key_values
    got, wanted, after, expected = both_ways(model, token_ids(2, 20, seed=4), cache, monkeypatch)
    assert len(calls) == 20
    torch.testing.assert_close(got, wanted, atol=1e-10 * float(wanted.abs().max()), rtol=0)
    for (path, tensor), (_, other) in zip(after.state.tensors(), expected.state.tensors(), strict=True):
        torch.testing.assert_close(tensor, other, atol=1e-10, rtol=1e-10, msg=lambda text, path=path: f"{path}: {text}")


@torch.no_grad()
def test_weights_changed_in_place_count_at_the_next_token(monkeypatch, calls):
    """No stage keeps what was computed from a weight."""
    for name in sorted(STAGES.keys() - {"extended"}):
        model, ids = model_of(next(case for case in EXAMPLES if case.name == name)), token_ids(2, 2)
        cache = model(token_ids(2, 4)).past_key_values
        decode(model, ids, cache.fork())
        for parameter in model.parameters():
            parameter.mul_(1.25)
        got, wanted, *_ = both_ways(model, ids, cache, monkeypatch)
        torch.testing.assert_close(got, wanted, atol=1e-10 * float(wanted.abs().max()), rtol=0, msg=name)


def test_who_is_served_is_causal():
    for name in STAGES.keys() - {"extended"}:
        assert "causal" in mixer_class(name).directions
