"""torch.export with a length that may change, where kernels serve the recurrences.

Torch's own forms unroll the length, and the ring of a window depends on it: torch.export refuses those itself.
"""

import pytest
import torch
from torch import nn

from latte.ops import native
from tests.models.support import tiny_model, token_ids

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels were not built")


class Logits(nn.Module):
    """Ids to logits, without a cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


@pytest.mark.parametrize("variant", ["latte", "latte-r++", "gla", "transformer++"])
@torch.no_grad()
def test_an_exported_model_reads_other_lengths(variant):
    model = tiny_model(variant)
    exported = torch.export.export(
        Logits(model), (token_ids(2, 12),), dynamic_shapes=({1: torch.export.Dim("length", min=2, max=64)},)
    )
    for length in (2, 17, 40):
        ids = token_ids(2, length)
        torch.testing.assert_close(exported.module()(ids), model(ids, use_cache=False).logits)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_export_to_onnx_is_refused_in_a_sentence(tmp_path):
    model = tiny_model("latte")
    with pytest.raises(NotImplementedError, match=r"no ONNX form, expected torch\.export"):
        torch.onnx.export(model, (token_ids(2, 12),), str(tmp_path / "model.onnx"), dynamo=False)
    assert not list(tmp_path.iterdir())
