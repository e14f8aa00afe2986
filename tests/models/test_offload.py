"""Weights that accelerate keeps on the CPU or on disk between calls: the same logits and the same text."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload

from tests.models.support import VARIANTS, tiny_model, token_ids

IDS = token_ids(2, 9)


def is_container(module):
    return isinstance(module, torch.nn.ParameterDict | torch.nn.ParameterList)


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_offloaded_models_give_the_same(variant, where, tmp_path):
    model = tiny_model(variant)
    logits = model(IDS).logits
    text = model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    # Accelerate brings a module's weights when it is called; a ParameterDict never is, so its owner is named.
    owners = {type(owner).__name__ for owner in model.modules() for child in owner.children() if is_container(child)}
    settings = {"execution_device": torch.device("cpu"), "preload_module_classes": sorted(owners)}
    if where == "cpu":
        cpu_offload(model, **settings)
    else:
        disk_offload(model, str(tmp_path), **settings)
    assert torch.equal(model(IDS).logits, logits)
    assert torch.equal(model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0), text)
