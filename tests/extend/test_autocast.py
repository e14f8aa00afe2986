"""Extended models of every family under autocast: training, reading on from a state, generating."""

import pytest
import torch

from latte.extend import convert
from tests.extend.families import FAMILIES, small_model
from tests.models.support import token_ids


@pytest.mark.parametrize("family", FAMILIES)
def test_extended_models_train_and_generate_under_autocast(family):
    model = convert(small_model(family), {"window": 4, "sinks": 2, "num_latents": 4})
    ids = token_ids(2, 12, vocabulary=61)
    wanted = model.train()(ids, labels=ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert abs(loss - wanted) < 0.05 * wanted
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        whole = model(ids).logits.float()
        first = model(ids[:, :7])
        second = model(ids[:, 7:], past_key_values=first.past_key_values).logits.float()
        assert (whole[:, 7:] - second).abs().max() < 0.05 * whole.abs().max()
        assert model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 14)
