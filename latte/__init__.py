"""Linear-time attention as a latent-variable model: Latte, Latte-Macchiato and their kin.

Importing this registers the models with transformers' Auto classes.
"""

from latte import _environment, decode, mixers, ops  # noqa: F401  (the first sets what torch reads when it starts)
from latte.extend import LatteExtendedConfig, LatteExtendedForCausalLM
from latte.models import LatteCache, LatteConfig, LatteForCausalLM, LatteForSequenceClassification, preset
from latte.state import State
from latte.tokens import Tokens

__version__ = "0.1.0"

__all__ = [
    "LatteCache",
    "LatteConfig",
    "LatteExtendedConfig",
    "LatteExtendedForCausalLM",
    "LatteForCausalLM",
    "LatteForSequenceClassification",
    "State",
    "Tokens",
    "mixers",
    "ops",
    "preset",
]
