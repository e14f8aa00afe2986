"""Workflows as functions of plain arguments, for Python users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from latte.extend import LatteExtendedForCausalLM
from latte.recipe import ExtendRecipe
from latte.recipe.files import from_values
from latte.workflows.extension import extend


def extend_model(
    model: str | Path, out: str | Path, *, console: Console | None = None, **settings: Any
) -> tuple[LatteExtendedForCausalLM, PreTrainedTokenizerBase]:
    """Extend a pretrained language model to long contexts, as ``latte extend`` does, and load the result.

    Called again with the same arguments it goes on where the last call ended, and loads what is finished.

        model, tokenizer = latte.extend_model(
            "smollm2-135m", "smollm2-long", data={"source": "books.jsonl.gz"}, window=128, transfer={"steps": 200}
        )

    Args:
        model: a Hugging Face folder or name, a GGUF file, or ``smollm2-135m``.
        out: the folder that the extended model is written to.
        console: where progress is shown; standard error by default.
        **settings: fields of :class:`latte.recipe.ExtendRecipe`; groups such as ``data`` and ``transfer`` as
            dictionaries.

    Returns:
        The extended model, ready to generate, and its tokenizer.

    Raises:
        UserError: an unknown setting, or a model, text or folder that can't be used.
        Stopped: SIGTERM or SIGINT came; everything is saved.
    """
    from latte.loading import load_any

    recipe = from_values(ExtendRecipe, {**settings, "model": str(model), "out": str(out)})
    folder = extend(recipe, console)
    return load_any(str(folder))
