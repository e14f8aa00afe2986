"""Extending a pretrained language model: its attention becomes a window under one softmax with latents."""

from latte.extend.classifier import LatteExtendedForSequenceClassification
from latte.extend.config import LatteExtendedConfig
from latte.extend.model import LatteExtendedForCausalLM, convert

__all__ = ["LatteExtendedConfig", "LatteExtendedForCausalLM", "LatteExtendedForSequenceClassification", "convert"]
