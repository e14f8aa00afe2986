"""Extending by a function: the same as the command, with the model in hand afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import latte
from latte.errors import UserError
from tests.workflows.test_extension import folder  # noqa: F401  (a fixture)


def test_a_model_is_extended_and_loaded(folder: Path) -> None:  # noqa: F811
    settings = {
        "window": 8,
        "sinks": 2,
        "latents": 4,
        "data": {
            "source": str(folder / "train.txt"),
            "separator": "@@",
            "valid_source": str(folder / "valid.txt"),
            "cache": str(folder / "cache"),
        },
        "transfer": {"steps": 2, "sequence_length": 48},
        "distil": {"steps": 0},
        "lengthen": {"steps": 0},
        "judge": {
            "contexts": [32],
            "long_contexts": [],
            "max_tokens": 100,
            "retrieval_contexts": [],
            "decode_contexts": [],
        },
    }
    model, tokenizer = latte.extend_model(folder / "pretrained", folder / "long", **settings)
    assert isinstance(model, latte.LatteExtendedForCausalLM)
    ids = tokenizer("the red fox", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape[1] == ids.shape[1] + 3
    again, _ = latte.extend_model(folder / "pretrained", folder / "long", **settings)
    assert all(torch.equal(mine, other) for mine, other in zip(model.parameters(), again.parameters(), strict=True))


def test_unknown_settings_are_refused_before_anything_is_read(tmp_path):
    with pytest.raises(UserError, match="unknown setting widow, expected one of"):
        latte.extend_model("nothing", tmp_path / "out", widow=8)
    with pytest.raises(UserError, match=r"unknown setting transfer\.step"):
        latte.extend_model("nothing", tmp_path / "out", transfer={"step": 8})
    with pytest.raises(UserError, match="transfer is 8, expected its settings by name"):
        latte.extend_model("nothing", tmp_path / "out", transfer=8)
    assert not list(tmp_path.iterdir())


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="has no attribute 'extend_models'"):
        _ = latte.extend_models
