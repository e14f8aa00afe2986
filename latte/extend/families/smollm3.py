"""SmolLM3: Llama's shape, with layers whose queries and keys are not turned."""

from typing import Any

from latte.extend.families.base import Family, register
from latte.layers.rotary import Rotary


@register
class SmolLM3(Family):
    model_types = ("smollm3",)

    def rotary(self, module: Any, config: Any, layer: int) -> Rotary | None:
        return super().rotary(module, config, layer) if config.no_rope_layers[layer] else None
