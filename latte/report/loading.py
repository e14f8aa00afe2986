"""A model and its tokenizer from a folder, or one sentence on what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

import latte.models  # noqa: F401  (so that the Auto classes know them)
from latte.data.tokenizer import check_fits, load_tokenizer
from latte.errors import UserError
from latte.models import LatteForSequenceClassification

MODEL = "model"


def model_folder(name: str | Path) -> Path:
    """The folder of the model in a run's folder, or the folder itself.

    Raises:
        UserError: there is no model with weights in it.
    """
    path = Path(name)
    if not path.is_dir():
        raise UserError(f"there is no folder {path}")
    path = path / MODEL if (path / MODEL / "config.json").is_file() else path
    if not (path / "config.json").is_file():
        raise UserError(f"there is no model in {path}: expected the folder of a finished run, or one with config.json")
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{path} describes a model but has no weights (model.safetensors)")
    return path


def load(name: str | Path) -> tuple[Any, Any]:
    """The model, in float32 and ready to read, and its tokenizer.

    Raises:
        UserError: there is none, its files can't be read, or the tokenizer is another model's.
    """
    path = model_folder(name)
    transformers_logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path)
        classifies = LatteForSequenceClassification.__name__ in (config.architectures or [])
        kind: Any = LatteForSequenceClassification if classifies else AutoModelForCausalLM
        model = kind.from_pretrained(path, dtype=torch.float32, use_safetensors=True).eval()
    except Exception as error:  # transformers and safetensors raise whatever they met first
        lines = str(error).strip().splitlines()
        raise UserError(f"the model in {path} can't be read: {lines[0] if lines else type(error).__name__}") from error
    tokenizer = load_tokenizer(str(path))
    check_fits(tokenizer, model.config.vocab_size, str(path))
    return model, tokenizer
