"""The loader of models: runs and folders, and one sentence for each way that it can fail, without the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from latte.data.tokenizer import load_tokenizer
from latte.errors import UserError
from latte.files import may_be_on_hub
from latte.loading import load, load_folder, load_model
from latte.models import LatteForSequenceClassification
from tests.report.support import config, model, saved


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any request to the hub fails the test."""
    refuse = lambda *args, **kwargs: pytest.fail("asked the hub")  # noqa: E731
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", refuse)
    monkeypatch.setattr("huggingface_hub.file_download.hf_hub_download", refuse)


def refusal(call: Any, *given: Any) -> str:
    with pytest.raises(UserError) as caught:
        call(*given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("read", [load, load_folder])
def test_a_run_and_its_model_are_the_same(tmp_path: Path, read: Any) -> None:
    saved(tmp_path / "run" / "model")
    for folder in (tmp_path / "run", tmp_path / "run" / "model"):
        found, tokenizer = read(str(folder))
        assert not found.training
        assert len(tokenizer) == found.config.vocab_size
        assert torch.equal(found.lm_head.weight, model().lm_head.weight)


def test_a_name_that_can_only_be_a_path_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("/nowhere", "./here", "~/here", "a/b/c", "runs/latest", "mine/run", "not a name"):
        assert not may_be_on_hub(name)
        assert f"there is no folder {name}: expected a run's, a model's, or a name on the hub" in refusal(load, name)
        assert "there is no folder" in refusal(load_folder, name)
        assert f"there is no tokenizer {name!r}" in refusal(load_tokenizer, name)
    for name in ("gpt2", "openai-community/gpt2", "HuggingFaceTB/SmolLM2-135M"):
        assert may_be_on_hub(name)
    assert "there is no folder gpt2" in refusal(load_folder, "gpt2")
    (tmp_path / "text.txt").write_text("")
    assert "text.txt is a file: expected" in refusal(load, "text.txt")


@pytest.mark.parametrize("read", [load, load_folder])
def test_what_a_folder_may_lack(tmp_path: Path, read: Any) -> None:
    assert "there is no model in" in refusal(read, str(tmp_path))
    folder = saved(tmp_path / "m")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    name = next(name for name in weights if "norm" in name)
    part = {other: value for other, value in weights.items() if other != name}
    safetensors.torch.save_file(part, folder / "model.safetensors", metadata={"format": "pt"})
    assert f"lacks 1 of the weights of LatteForCausalLM, {name}" in refusal(read, str(folder))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-9])
    assert "is not a whole safetensors file" in refusal(read, str(folder))
    (folder / "model.safetensors").unlink()
    assert "has no weights" in refusal(read, str(folder))
    saved(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    assert f"there is no usable tokenizer in {folder}" in refusal(read, str(folder))
    (folder / "config.json").write_text("{")
    assert f"there is no usable causal language model in {folder}" in refusal(read, str(folder))


def test_a_classifier_is_inspected_but_not_taken_for_a_language_model(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m")
    LatteForSequenceClassification(config("latte", bidirectional=True)).save_pretrained(folder)
    assert "LatteForSequenceClassification" in json.loads((folder / "config.json").read_text())["architectures"]
    assert isinstance(load_folder(folder)[0], LatteForSequenceClassification)
    assert f"{folder} is a classifier, expected a causal language model" in refusal(load_model, folder)
