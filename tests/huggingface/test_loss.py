"""The loss is the cross-entropy of the model's own logits, whatever stands in the head's place, and Trainer's mean."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize
from transformers import Trainer, TrainingArguments

from latte.models import loss as loss_module
from tests.huggingface.support import each_kind, language_model
from tests.models.support import token_ids


def cross_entropy(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


@each_kind
def test_an_adapter_on_the_head_counts_in_the_loss_and_learns(kind):
    model = language_model(kind, tie_word_embeddings=False)
    head = "base.lm_head" if kind == "extended" else "lm_head"
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=[head], init_lora_weights=False)).train()
    ids = token_ids(2, 9, vocabulary=61)
    loss = tuned(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, cross_entropy(tuned(input_ids=ids).logits, ids))
    loss.backward()
    adapters = {name: weight.grad for name, weight in tuned.named_parameters() if "lora_" in name}
    assert len(adapters) == 2
    assert all(grad is not None and grad.abs().max() > 0 for grad in adapters.values())


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


@each_kind
@pytest.mark.parametrize("change", ["hook", "parametrization", "bias", "replaced forward"])
def test_a_head_that_is_no_plain_product_is_called_for_the_loss(kind, change):
    model, ids = language_model(kind).train(), token_ids(2, 9, vocabulary=61)
    head = model.get_output_embeddings()
    if change == "hook":
        head.register_forward_hook(lambda module, inputs, output: 3 * output)
    elif change == "parametrization":
        parametrize.register_parametrization(head, "weight", Double())
    elif change == "bias":
        head.bias = nn.Parameter(torch.randn(head.weight.shape[0]))
    else:
        plain = head.forward
        head.forward = lambda x: 3 * plain(x)
    found = model(ids, labels=ids)
    assert found.logits is None
    torch.testing.assert_close(found.loss, cross_entropy(model(ids).logits, ids))


def test_a_plain_head_is_read_block_by_block_in_training(monkeypatch):
    calls = []
    lean = loss_module.linear_cross_entropy
    monkeypatch.setattr(loss_module, "linear_cross_entropy", lambda *given: calls.append(1) or lean(*given))
    model, ids = language_model("own").train(), token_ids(2, 9)
    assert model(ids, labels=ids).logits is None
    assert calls == [1]


@each_kind
def test_logits_stand_beside_the_loss_in_eval_mode_and_where_they_are_asked_for(kind):
    model, ids = language_model(kind), token_ids(2, 9, vocabulary=61)
    found = model(ids, labels=ids)
    assert torch.equal(found.logits, model(ids, use_cache=False).logits)
    torch.testing.assert_close(found.loss, cross_entropy(found.logits, ids))
    assert model(ids, labels=ids, return_logits=False).logits is None
    model.train()
    assert model(ids, labels=ids).logits is None
    assert model(ids, labels=ids, return_logits=True).logits.shape == found.logits.shape
    model.config.return_logits = True
    assert model(ids, labels=ids).logits is not None


@each_kind
def test_labels_of_another_length_are_refused(kind):
    model, ids = language_model(kind), token_ids(2, 9, vocabulary=61)
    with pytest.raises(ValueError, match=r"labels has shape \(2, 8\), expected \(2, 9\)"):
        model(ids, labels=ids[:, 1:])


def test_shifted_labels_are_targets_as_they_stand():
    model, ids = language_model("own").train(), token_ids(2, 9)
    shifted = F.pad(ids[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(ids, shift_labels=shifted).loss, model(ids, labels=ids).loss)


def padded_batch():
    ids, mask = token_ids(2, 12, vocabulary=61), torch.ones(2, 12, dtype=torch.long)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


@each_kind
def test_pads_among_the_labels_do_not_lower_the_loss_that_trainer_sees(kind, tmp_path):
    model, batch = language_model(kind).train(), padded_batch()
    rows = [{name: value[row] for name, value in batch.items()} for row in range(2)]
    arguments = TrainingArguments(tmp_path, report_to="none", per_device_train_batch_size=2, use_cpu=True)
    trainer = Trainer(model, arguments, train_dataset=rows)
    items = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    found = trainer.compute_loss(model, dict(batch), num_items_in_batch=items)
    targets = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    torch.testing.assert_close(found, cross_entropy(logits, targets))


@each_kind
def test_trainer_evaluates_with_compute_metrics(kind, tmp_path):
    model, batch = language_model(kind), padded_batch()
    rows = [{name: value[row] for name, value in batch.items()} for row in range(2)]
    seen = []
    trainer = Trainer(
        model,
        TrainingArguments(tmp_path, report_to="none", use_cpu=True),
        eval_dataset=rows,
        compute_metrics=lambda result: seen.append(result.predictions.shape) or {"seen": 1.0},
    )
    assert trainer.evaluate()["eval_seen"] == 1
    assert seen == [(2, 12, model.config.vocab_size)]
