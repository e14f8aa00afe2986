"""Extended models where torch hides numbers: on the meta device and in compiled graphs."""

import pytest
import torch

from latte.extend.model import convert
from latte.testing.numbers import assert_close
from tests.extend.families import small_model

IDS = torch.randint(0, 60, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    return convert(small_model("llama"), {"window": 8, "num_latents": 8}).eval()


def test_a_forward_on_the_meta_device(model):
    ids = IDS.to("meta")
    output = model.to("meta")(ids, labels=ids)
    assert output.loss.device.type == "meta"
    assert output.logits.shape[:2] == IDS.shape


def test_it_compiles_whole(model):
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")(IDS, labels=IDS, use_cache=False)
        assert_close(compiled.loss, model(IDS, labels=IDS, use_cache=False).loss, 1e-5)
