"""Models generic over mixers; importing this registers them with transformers' Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from latte.models.cache import LatteCache, ModelState
from latte.models.classifier import LatteForSequenceClassification
from latte.models.config import LatteConfig
from latte.models.decoder import LatteForCausalLM, LatteModel
from latte.models.presets import SIZES, preset, variants
from latte.models.token_heads import LatteForMaskedLM, LatteForTokenClassification

AutoConfig.register(LatteConfig.model_type, LatteConfig, exist_ok=True)
AutoModel.register(LatteConfig, LatteModel, exist_ok=True)
AutoModelForCausalLM.register(LatteConfig, LatteForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(LatteConfig, LatteForSequenceClassification, exist_ok=True)
AutoModelForMaskedLM.register(LatteConfig, LatteForMaskedLM, exist_ok=True)
AutoModelForTokenClassification.register(LatteConfig, LatteForTokenClassification, exist_ok=True)

__all__ = [
    "SIZES",
    "LatteCache",
    "LatteConfig",
    "LatteForCausalLM",
    "LatteForMaskedLM",
    "LatteForSequenceClassification",
    "LatteForTokenClassification",
    "LatteModel",
    "ModelState",
    "preset",
    "variants",
]
