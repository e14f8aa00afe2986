"""Classifiers and masked language models, alone and on extended models: losses as transformers computes them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

from latte.models import LatteForMaskedLM, LatteForSequenceClassification, LatteForTokenClassification
from tests.models.support import tiny_config, token_ids

HEADS = {
    LatteForSequenceClassification: AutoModelForSequenceClassification,
    LatteForTokenClassification: AutoModelForTokenClassification,
    LatteForMaskedLM: AutoModelForMaskedLM,
}
each_head = pytest.mark.parametrize("head", HEADS, ids=lambda head: head.__name__)


def headed(head, **overrides):
    settings = {"bidirectional": True, "num_labels": 3, "initializer_range": 0.2, **overrides}
    return head(tiny_config("latte-r-swa++", **settings)).eval()


@pytest.mark.parametrize(
    ("labels", "settings", "wanted"),
    [
        (torch.tensor([2, 0]), {}, F.cross_entropy),
        (torch.tensor([[1.0, 0, 1], [0, 0, 1]]), {}, F.binary_cross_entropy_with_logits),
        (
            torch.tensor([[1.0, 0, 1], [0, 0, 1]]),
            {"problem_type": "multi_label_classification"},
            F.binary_cross_entropy_with_logits,
        ),
        (torch.tensor([[0.3], [-2.0]]), {"num_labels": 1}, F.mse_loss),
        (torch.tensor([0.3, -2.0]), {"num_labels": 1}, lambda logits, labels: F.mse_loss(logits[:, 0], labels)),
        (torch.tensor([3, 1]), {"num_labels": 1}, lambda logits, labels: F.mse_loss(logits[:, 0], labels.float())),
        (torch.randn(2, 3), {"problem_type": "regression"}, F.mse_loss),
    ],
)
def test_a_classifier_has_the_loss_of_its_problem(labels, settings, wanted):
    model, ids = headed(LatteForSequenceClassification, **settings), token_ids(2, 9)
    found = model(ids, labels=labels)
    torch.testing.assert_close(found.loss, wanted(found.logits, labels))
    parts = [
        model(ids[row : row + 1], labels=labels[row : row + 1], num_items_in_batch=labels.numel()).loss
        for row in (0, 1)
    ]
    torch.testing.assert_close(sum(parts), found.loss)


def test_labels_that_do_not_fit_a_problem_are_refused():
    model, ids = headed(LatteForSequenceClassification), token_ids(2, 9)
    with pytest.raises(ValueError, match=r"labels has shape \(2, 2\), expected \(2, 3\) for multi_label"):
        model(ids, labels=torch.zeros(2, 2))
    with pytest.raises(ValueError, match=r"labels has shape \(3,\), expected \(2,\) for single_label"):
        model(ids, labels=torch.zeros(3, dtype=torch.long))


def test_accumulated_gradients_of_a_classifier_are_those_of_the_whole_batch(tmp_path):
    rows = [{"input_ids": ids, "labels": label} for ids, label in zip(token_ids(4, 9), (0, 2, 1, 1), strict=True)]
    steps = {}
    for accumulation in (1, 4):
        torch.manual_seed(0)
        model = headed(LatteForSequenceClassification)
        arguments = TrainingArguments(
            tmp_path,
            report_to="none",
            save_strategy="no",
            per_device_train_batch_size=4 // accumulation,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            max_grad_norm=0,
            learning_rate=1.0,
            optim="sgd",
            lr_scheduler_type="constant",
            disable_tqdm=True,
            use_cpu=True,
        )
        before = model.score.weight.detach().clone()
        Trainer(model, arguments, train_dataset=rows).train()
        steps[accumulation] = model.score.weight.detach() - before
    torch.testing.assert_close(steps[4], steps[1], rtol=1e-4, atol=1e-6)


def test_a_masked_language_model_predicts_from_both_sides():
    model, ids = headed(LatteForMaskedLM), token_ids(2, 9)
    changed = ids.clone()
    changed[:, 0], changed[:, -1] = (ids[:, 0] + 1) % 97, (ids[:, -1] + 1) % 97
    labels = torch.full_like(ids, -100)
    labels[0, 4], labels[1, 2] = 5, 6
    found = model(ids, labels=labels)
    torch.testing.assert_close(found.loss, F.cross_entropy(found.logits[[0, 1], [4, 2]], torch.tensor([5, 6])))
    assert not torch.equal(found.logits[:, 4], model(changed).logits[:, 4])
    parts = [model(ids[r : r + 1], labels=labels[r : r + 1], num_items_in_batch=2).loss for r in (0, 1)]
    torch.testing.assert_close(sum(parts), found.loss)


def test_a_token_classifier_labels_every_token():
    model, ids = headed(LatteForTokenClassification), token_ids(2, 9)
    labels = token_ids(2, 9, vocabulary=3)
    labels[0, :4] = -100
    found = model(ids, labels=labels)
    assert found.logits.shape == (2, 9, 3)
    torch.testing.assert_close(found.loss, F.cross_entropy(found.logits.flatten(0, 1), labels.flatten()))
    with pytest.raises(ValueError, match=r"labels has shape \(2, 8\), expected \(2, 9\)"):
        model(ids, labels=labels[:, 1:])


@pytest.mark.parametrize("head", [LatteForMaskedLM, LatteForTokenClassification])
def test_heads_of_single_tokens_need_both_sides(head):
    with pytest.raises(ValueError, match=r"config\.bidirectional is False, expected True"):
        headed(head, bidirectional=False)


@each_head
@torch.no_grad()
def test_embeddings_stand_for_ids_and_padding_changes_nothing(head):
    model, ids = headed(head).double(), token_ids(1, 9)
    mask = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0]])
    padded = model(ids, attention_mask=mask).logits
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask).logits
    torch.testing.assert_close(embedded, padded, rtol=0, atol=1e-12)
    alone = model(ids[mask.bool()][None]).logits
    real = padded if head is LatteForSequenceClassification else padded[mask.bool()][None]
    torch.testing.assert_close(real, alone, rtol=0, atol=1e-10)


@each_head
@torch.no_grad()
def test_a_head_is_saved_and_found_by_its_auto_class(head, tmp_path):
    model, ids = headed(head), token_ids(2, 9)
    model.save_pretrained(tmp_path)
    loaded = HEADS[head].from_pretrained(tmp_path)
    assert type(loaded) is head
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@each_head
def test_keywords_of_heads_are_checked(head):
    model, ids = headed(head), token_ids(1, 6)
    with pytest.raises(ValueError, match=r"no argument 'attention_maks' \(did you mean 'attention_mask'\?\)"):
        model(ids, attention_maks=None)


@torch.no_grad()
def test_a_row_of_several_documents_has_no_single_verdict():
    model, ids = headed(LatteForSequenceClassification), token_ids(1, 6)
    assert torch.equal(model(ids, position_ids=torch.arange(6)).logits, model(ids).logits)
    with pytest.raises(ValueError, match="several documents"):
        model(ids, position_ids=torch.tensor([0, 1, 2, 0, 1, 2]))
