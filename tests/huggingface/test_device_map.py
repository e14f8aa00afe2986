"""A layer that from_pretrained leaves on disk, by ``device_map``: the same logits and the same text."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from latte.extend.model import convert
from tests.extend.families import small_model
from tests.models.support import tiny_model

IDS = torch.randint(1, 30, (2, 9), generator=torch.Generator().manual_seed(0))


def first_layer_on_disk(model, prefix=""):
    """A place for every module beside the layers, and for each layer."""
    places = {}
    for name, child in model.named_children():
        if name == "model" or name == "base":
            places |= first_layer_on_disk(child, f"{prefix}{name}.")
        elif isinstance(child, torch.nn.ModuleList):
            places |= {f"{prefix}{name}.{i}": "cpu" if i else "disk" for i in range(len(child))}
        else:
            places[prefix + name] = "cpu"
    return places


@pytest.mark.parametrize("kind", ["latte", "extended"])
def test_a_layer_on_disk_gives_the_same(kind, tmp_path):
    model = tiny_model("latte") if kind == "latte" else convert(small_model("llama"), {"window": 8, "num_latents": 8})
    model.eval().save_pretrained(tmp_path / "model")
    settings = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    logits, text = model(IDS).logits, model.generate(IDS, **settings)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=first_layer_on_disk(model), offload_folder=str(tmp_path / "weights")
    )
    assert any(parameter.is_meta for parameter in loaded.parameters())
    assert torch.equal(loaded(IDS).logits, logits)
    assert torch.equal(loaded.generate(IDS, **settings), text)
