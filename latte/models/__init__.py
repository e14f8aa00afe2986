"""Models generic over mixers; importing this registers them with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from latte.models.cache import LatteCache, ModelState
from latte.models.classifier import LatteForSequenceClassification
from latte.models.config import LatteConfig
from latte.models.decoder import LatteForCausalLM, LatteModel
from latte.models.presets import SIZES, preset, variants

AutoConfig.register(LatteConfig.model_type, LatteConfig, exist_ok=True)
AutoModel.register(LatteConfig, LatteModel, exist_ok=True)
AutoModelForCausalLM.register(LatteConfig, LatteForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(LatteConfig, LatteForSequenceClassification, exist_ok=True)

__all__ = [
    "SIZES",
    "LatteCache",
    "LatteConfig",
    "LatteForCausalLM",
    "LatteForSequenceClassification",
    "LatteModel",
    "ModelState",
    "preset",
    "variants",
]
