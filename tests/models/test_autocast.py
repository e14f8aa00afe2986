"""Models of every variant under autocast: training, reading on from a state, generating."""

import pytest
import torch

from tests.models.support import VARIANTS, tiny_model, token_ids


@pytest.mark.parametrize("variant", VARIANTS)
def test_models_train_and_generate_under_autocast(variant):
    model, ids = tiny_model(variant), token_ids(2, 12)
    wanted = model.train()(ids, labels=ids).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert abs(loss - wanted) < 0.05 * wanted
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        first = model(ids[:, :7])
        assert model(ids[:, 7:], past_key_values=first.past_key_values).logits.shape == (2, 5, 97)
        assert model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 14)
