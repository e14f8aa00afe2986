"""Packages that only some uses need: imported where they are used, with one sentence where they are missing."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from latte.errors import UserError

#: Modules with the extra of this package that installs them.
EXTRAS = {
    "gguf": "extend",
    "peft": "extend",
    "sentencepiece": "extend",
    "lm_eval": "tasks",
    "matplotlib": "report",
    "tensorboard": "tensorboard",
}


def installed(name: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(name.partition(".")[0]) is not None


def advice(name: str) -> str:
    """How to install a package, in brackets of a sentence."""
    return f"pip install 'latte-attention[{EXTRAS[name.partition('.')[0]]}]'"


def need(name: str, purpose: str) -> ModuleType:
    """Import a module of an extra.

    Args:
        purpose: what it is needed for, as the subject of a sentence.

    Raises:
        UserError: it is not installed; the sentence says how to install it.
    """
    if not installed(name):
        package = name.partition(".")[0]
        raise UserError(f"{purpose} needs {package}, which is not installed: {advice(name)}")
    return importlib.import_module(name)
