"""Phi-3: one projection for queries, keys and values."""

from typing import Any

from torch import Tensor

from latte.extend.families.base import Family, register
from latte.layers.linear import split_heads


@register
class Phi3(Family):
    model_types = ("phi3",)

    def refusal(self, config: Any) -> str | None:
        part = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
        if part != 1.0:
            return f"its rotary encoding turns {part} of each head, expected all of it"
        return super().refusal(config)

    def queries_and_keys(self, attention: Any, x_BTD: Tensor, config: Any) -> tuple[Tensor, Tensor]:
        heads, groups, _ = self.heads(config)
        q_BTD, k_BTD, _ = self._split(attention, x_BTD, config)
        return split_heads(q_BTD, heads), split_heads(k_BTD, groups)

    def values(self, attention: Any, x_BTD: Tensor, config: Any) -> Tensor:
        return split_heads(self._split(attention, x_BTD, config)[2], self.heads(config)[1])

    def _split(self, attention: Any, x_BTD: Tensor, config: Any) -> tuple[Tensor, ...]:
        heads, groups, width = self.heads(config)
        return attention.qkv_proj(x_BTD).split([heads * width, groups * width, groups * width], dim=-1)
