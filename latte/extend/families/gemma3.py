"""Gemma 3: normed heads, another rotary encoding in layers that see a window, and queries with a scale of their own."""

from typing import Any

from torch import Tensor

from latte.extend.families.base import register
from latte.extend.families.gemma2 import Gemma2
from latte.layers.rotary import Rotary


@register
class Gemma3(Gemma2):
    model_types = ("gemma3_text",)
    shape = None

    def rotary_kinds(self, config: Any) -> list[str]:
        return [(config.rope_parameters[kind] or {}).get("rope_type", "default") for kind in set(config.layer_types)]

    def rotary(self, module: Any, config: Any, layer: int) -> Rotary | None:
        kind = config.layer_types[layer]
        frequencies, stretch = getattr(module, f"{kind}_inv_freq"), getattr(module, f"{kind}_attention_scaling")
        return self.turning(frequencies, stretch, config)

    def softcap(self, config: Any) -> float | None:
        return None  # the configuration has one, and the model does not use it

    def queries_and_keys(self, attention: Any, x_BTD: Tensor, config: Any) -> tuple[Tensor, Tensor]:
        q_BTHK, k_BTGK = super().queries_and_keys(attention, x_BTD, config)
        return attention.q_norm(q_BTHK), attention.k_norm(k_BTGK)
