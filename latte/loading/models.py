"""The one loader of models and tokenizers: from a run's folder, a model's folder, or a name on the hub.

Nothing of the source is executed: neither remote code nor pickled weights. Every failure is a UserError of one
sentence, and a path that does not exist fails at once, without a request to the hub.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from latte.data.tokenizer import check_fits, load_tokenizer
from latte.errors import UserError, reason
from latte.hub import require_findable
from latte.loading.weights import FOLDER, Say, Weights, find_weights, require_whole, to_stderr
from latte.models import LatteForSequenceClassification


def load(name: str, tokenizer_name: str | None = None, say: Say = to_stderr) -> tuple[Any, PreTrainedTokenizerBase]:
    """A causal language model in eval mode and its tokenizer, by folder or name on the hub.

    Args:
        say: called with a sentence if a run is not finished and a checkpoint is read.

    Raises:
        UserError: either is missing, damaged or unreadable, or the tokenizer has more tokens than the model.
    """
    weights = model_weights(name, say) if Path(name).is_dir() else None
    model = load_model(name) if weights is None else _language_model(weights.folder, name)
    if tokenizer_name is not None:
        tokenizer = load_tokenizer(tokenizer_name)
    else:
        source = name if weights is None else weights.tokenizer
        tokenizer = load_tokenizer(str(source), source=source)
    check_fits(tokenizer, model.config.vocab_size, name)
    return model, tokenizer


def load_folder(name: str | Path, say: Say = to_stderr) -> tuple[Any, PreTrainedTokenizerBase]:
    """A model of this project, language model or classifier, in float32 and eval mode, and its tokenizer.

    Raises:
        UserError: as :func:`load`; there is no folder of that name.
    """
    weights = model_weights(name, say)
    folder = weights.folder
    model = _read_checked(folder, LatteForSequenceClassification if _classifies(folder) else None, torch.float32)
    tokenizer = load_tokenizer(str(weights.tokenizer), source=weights.tokenizer)
    check_fits(tokenizer, model.config.vocab_size, str(folder))
    return model, tokenizer


def load_model(name: str | Path, say: Say = to_stderr) -> Any:
    """A causal language model in eval mode: float32 without a GPU, since bfloat16 is far slower on most CPUs.

    Raises:
        UserError: there is none, or its files are damaged or incomplete.
    """
    if Path(name).is_dir():
        return _language_model(model_weights(name, say).folder, name)
    if Path(name).is_file():
        raise UserError(f"{name} is a file: expected the folder of a run or a model, or a name on the hub")
    require_findable(str(name))
    return read_model(str(name))


def model_weights(name: str | Path, say: Say = to_stderr) -> Weights:
    """Where a run's or a model's folder keeps its weights, as :func:`find_weights`.

    Raises:
        UserError: there is no model with weights in it.
    """
    weights = find_weights(name, say)
    weight_files(weights.folder, FOLDER)
    return weights


def weight_files(folder: Path, expected: str) -> list[Path]:
    """The safetensors files of a model's folder: one, or those that its index lists.

    Raises:
        UserError: a file is missing; ``expected`` says what the folder should have been.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"there is no model in {folder}, it has no config.json: expected {expected}")
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if not index.is_file():
        raise UserError(
            f"{folder} has no weights (model.safetensors): pickled ones (.bin, .pt) are not read, they can run code"
        )
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{index} is damaged: it names no files of weights") from error


def check_weights(files: list[Path]) -> None:
    """Open each file, which compares its header with its length.

    Raises:
        UserError: a file is missing or cut off.
    """
    for file in files:
        try:
            with safe_open(file, "numpy"):
                pass
        except Exception as error:
            raise UserError(f"{file} is not a whole safetensors file: {reason(error)}") from error


def read_model(
    source: str | Path, *, shown: object = None, kind: Any = None, dtype: torch.dtype | None = None, **settings: Any
) -> Any:
    """``from_pretrained`` with all weights required: transformers would fill missing ones with random numbers.

    Args:
        shown: how messages name the source, if not by its own name.
        kind: the class to load; by default a causal language model.
        settings: passed to ``from_pretrained``.

    Raises:
        UserError: it can't be read, or weights are missing.
    """
    shown = source if shown is None else shown
    what = "causal language model" if kind is None else "model"
    wanted: Any = dtype or ("auto" if torch.cuda.is_available() else torch.float32)
    settings = {"use_safetensors": True, "trust_remote_code": False, **settings}  # False, or transformers would ask
    with quiet():
        try:
            loaded: Any = (kind or AutoModelForCausalLM).from_pretrained(
                source, dtype=wanted, output_loading_info=True, **settings
            )
        except Exception as error:  # transformers and safetensors raise errors of many types
            raise UserError(f"there is no usable {what} in {shown}: {reason(error)}") from error
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise UserError(
            f"{shown} lacks {len(missing)} of the weights of {type(model).__name__}, {missing[0]} among them: "
            f"it is cut off, or not a {what}"
        )
    return model.eval()


@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' progress bars and warnings: what matters in them is raised here."""
    bar, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        with redirect_stderr(io.StringIO()):  # the progress bar of GGUF has no switch
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bar:
            transformers_logging.enable_progress_bar()


def _language_model(folder: Path, name: str | Path) -> Any:
    if _classifies(folder):
        raise UserError(f"{name} is a classifier, expected a causal language model")
    return _read_checked(folder)


def _read_checked(folder: Path, kind: Any = None, dtype: torch.dtype | None = None) -> Any:
    check_weights(weight_files(folder, FOLDER))
    require_whole(folder)
    return read_model(folder, kind=kind, dtype=dtype)


def _classifies(folder: Path) -> bool:
    """Whether a folder's configuration names our classifier."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return LatteForSequenceClassification.__name__ in (config.get("architectures") or [])
    except (ValueError, AttributeError, TypeError):
        return False  # from_pretrained says what is wrong with it
