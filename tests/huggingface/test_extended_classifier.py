"""A sequence classifier on an extended model, beside transformers' own on the pretrained one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, LlamaForSequenceClassification

from latte.extend import LatteExtendedForSequenceClassification, convert
from tests.extend.families import small_model
from tests.models.support import token_ids


@pytest.fixture
def extended_folder(tmp_path):
    """An extended language model whose window sees all of the tests' tokens: it computes what the pretrained does."""
    model = convert(small_model("llama"), {"window": 32, "num_latents": 2, "feed": "rglru"})
    model.save_pretrained(tmp_path)
    return tmp_path


def classifier(folder, **settings):
    torch.manual_seed(0)
    settings = {"num_labels": 3, **settings}
    return AutoModelForSequenceClassification.from_pretrained(folder, **settings).eval()


def padded():
    ids, mask = token_ids(3, 9, vocabulary=60) + 1, torch.ones(3, 9, dtype=torch.long)
    mask[1, 5:], mask[2, :4] = 0, 0
    return ids.masked_fill(mask == 0, 0), mask


@torch.no_grad()
def test_it_is_transformers_own_where_the_window_sees_everything(extended_folder):
    model, pretrained = classifier(extended_folder), small_model("llama")
    assert isinstance(model, LatteExtendedForSequenceClassification)
    pretrained.config.num_labels = 3
    reference = LlamaForSequenceClassification(pretrained.config).eval()
    reference.model.load_state_dict(pretrained.model.state_dict())
    reference.score.load_state_dict(model.score.state_dict())
    ids, mask = padded()
    found, wanted = (m(ids, attention_mask=mask).logits for m in (model, reference))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(ids[:2]).logits, wanted[:2], rtol=1e-4, atol=1e-4)  # pads known by their id


@torch.no_grad()
def test_padding_does_not_change_the_verdict(extended_folder):
    model, (ids, mask) = classifier(extended_folder), padded()
    together = model(ids, attention_mask=mask).logits
    for row in range(3):
        alone = model(ids[row : row + 1, mask[row].bool()]).logits
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("labels", "settings", "wanted"),
    [
        (torch.tensor([2, 0, 1]), {}, F.cross_entropy),
        (torch.eye(3), {"problem_type": "multi_label_classification"}, F.binary_cross_entropy_with_logits),
        (torch.tensor([[0.3], [-2.0], [1.0]]), {"num_labels": 1}, F.mse_loss),
    ],
)
def test_it_learns_with_the_loss_of_its_problem(extended_folder, labels, settings, wanted):
    model, (ids, mask) = classifier(extended_folder, **settings), padded()
    for mixer in model.extended.mixers:
        torch.nn.init.zeros_(mixer.slot0_bias)  # the latents get weight, and so a gradient
    found = model(ids, attention_mask=mask, labels=labels)
    torch.testing.assert_close(found.loss, wanted(found.logits, labels))
    found.loss.backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert {"score.weight", "extended.base.model.embed_tokens.weight"} <= trained
    assert any("latent_q_proj" in name for name in trained)


@torch.no_grad()
def test_it_is_saved_and_loaded_with_its_head(extended_folder, tmp_path):
    model, (ids, mask) = classifier(extended_folder), padded()
    model.save_pretrained(tmp_path / "classifier")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier").eval()
    assert torch.equal(loaded(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits)


def test_rows_of_several_documents_and_unknown_keywords_are_refused(extended_folder):
    model, ids = classifier(extended_folder), token_ids(1, 6, vocabulary=61)
    with pytest.raises(ValueError, match="rows hold several documents, expected one document a row"):
        model(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    with pytest.raises(ValueError, match="no argument 'attention_maks'"):
        model(ids, attention_maks=torch.ones_like(ids))
