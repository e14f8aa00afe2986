"""torch.compile and torch.export of models with windows, ours and extended ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from latte.ops import native
from tests.huggingface.support import each_kind, language_model
from tests.models.support import token_ids

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels were not built")


class Logits(nn.Module):
    """Ids to logits, without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids, use_cache=False).logits


@each_kind
@pytest.mark.parametrize("loaded", [False, True], ids=["made here", "loaded"])
def test_a_model_compiles_without_a_break_and_learns_the_same(kind, loaded, tmp_path):
    """A loaded one before any other call: nothing may wait for the first call to be computed."""
    model, ids = language_model(kind).train(), token_ids(2, 9, vocabulary=61)
    if loaded:
        model.save_pretrained(tmp_path)
        compiled_first = AutoModelForCausalLM.from_pretrained(tmp_path).train()
        loss = torch.compile(compiled_first, fullgraph=True, backend="aot_eager")(ids, labels=ids).loss
        torch.testing.assert_close(loss, model(ids, labels=ids).loss, rtol=1e-4, atol=1e-5)
        model = compiled_first
    gradients = []
    for forward in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        forward(ids, labels=ids).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) > 20
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


@each_kind
@torch.no_grad()
def test_a_model_with_a_window_is_exported_for_one_length(kind):
    model, ids = language_model(kind), token_ids(2, 9, vocabulary=61)
    exported = torch.export.export(Logits(model), (ids,))
    other = token_ids(2, 9, seed=2, vocabulary=61)
    torch.testing.assert_close(exported.module()(other), model(other, use_cache=False).logits)
    length = torch.export.Dim("length", min=2, max=64)
    with pytest.raises(torch._dynamo.exc.UserError, match="length"):
        torch.export.export(Logits(model), (ids,), dynamic_shapes=({1: length},))
