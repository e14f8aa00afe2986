"""Granite: Llama's shape with multipliers of its own on embeddings, attention logits and logits."""

from typing import Any

from torch import Tensor

from latte.extend.families.base import Family, register


@register
class Granite(Family):
    model_types = ("granite",)

    def scale(self, config: Any) -> float:
        return config.attention_multiplier

    def enter(self, x_BTD: Tensor, config: Any) -> Tensor:
        return x_BTD * config.embedding_multiplier

    def finish_logits(self, logits: Tensor, config: Any) -> Tensor:
        return logits / config.logits_scaling
