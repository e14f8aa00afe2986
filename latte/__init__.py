"""Linear-time attention as a latent-variable model: Latte, Latte-Macchiato and their kin.

Importing this registers the models with transformers' Auto classes.
"""

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
