"""Features of Trainer on language models: each changes how a step is computed, and not what it learns."""

from __future__ import annotations

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from tests.huggingface.support import each_kind, language_model
from tests.models.support import token_ids

LENGTHS = (9, 5, 7, 9)


def rows():
    """Documents of several lengths, labelled with their own ids."""
    documents = [token_ids(1, length, seed=length + 1, vocabulary=61)[0].tolist() for length in LENGTHS]
    return [{"input_ids": ids, "labels": ids} for ids in documents]


def pad(features):
    """A batch with padding on the right, -100 among its labels."""
    width = max(len(row["input_ids"]) for row in features)
    batch = {name: [] for name in ("input_ids", "attention_mask", "labels")}
    for row in features:
        ids, left = row["input_ids"], width - len(row["input_ids"])
        batch["input_ids"].append([*ids, *[0] * left])
        batch["attention_mask"].append([1] * len(ids) + [0] * left)
        batch["labels"].append([*ids, *[-100] * left])
    return {name: torch.tensor(value) for name, value in batch.items()}


def step(kind, folder, collator=pad, **settings):
    """The change of every parameter in one step of plain SGD on the four documents."""
    torch.manual_seed(0)
    model = language_model(kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    fixed = {"max_steps": 1, "optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    settings = {"per_device_train_batch_size": 4, **settings}
    arguments = TrainingArguments(folder, **fixed, **quiet, **settings)
    Trainer(model, arguments, train_dataset=rows(), data_collator=collator).train()
    return {name: p.detach() - before[name] for name, p in model.named_parameters()}


@each_kind
@pytest.mark.parametrize(
    "feature",
    [
        {"gradient_checkpointing": True},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"collator": DataCollatorWithFlattening()},
        {"collator": DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)},
    ],
    ids=["gradient checkpointing", "accumulation", "packing", "packing for kernels"],
)
def test_a_feature_of_trainer_does_not_change_the_step(kind, feature, tmp_path):
    wanted, found = step(kind, tmp_path), step(kind, tmp_path, **feature)
    assert any(change.abs().max() > 1e-3 for change in wanted.values())
    for name, change in wanted.items():
        torch.testing.assert_close(found[name], change, rtol=1e-3, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")
