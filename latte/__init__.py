"""Linear-time attention as a latent-variable model: Latte, Latte-Macchiato and their kin.

Importing this registers the models with transformers' Auto classes.
"""

import importlib
from typing import Any

from latte import _environment, decode, mixers, ops  # noqa: F401  (the first sets what torch reads when it starts)
from latte.extend import LatteExtendedConfig, LatteExtendedForCausalLM
from latte.memory import keep_memory
from latte.models import (
    LatteCache,
    LatteConfig,
    LatteForCausalLM,
    LatteForMaskedLM,
    LatteForSequenceClassification,
    LatteForTokenClassification,
    preset,
)
from latte.state import State
from latte.tokens import Tokens
from latte.version import __version__  # noqa: F401


def __getattr__(name: str) -> Any:
    """``latte.extend_model``: looked up when it is used, since training and reports take long to import."""
    if name == "extend_model":
        return getattr(importlib.import_module("latte.workflows.api"), name)
    raise AttributeError(f"module 'latte' has no attribute {name!r}")


__all__ = [
    "LatteCache",
    "LatteConfig",
    "LatteExtendedConfig",
    "LatteExtendedForCausalLM",
    "LatteForCausalLM",
    "LatteForMaskedLM",
    "LatteForSequenceClassification",
    "LatteForTokenClassification",
    "State",
    "Tokens",
    "keep_memory",
    "mixers",
    "ops",
    "preset",
]
