"""OLMo 2: queries and keys are normed over all heads together; norms stand behind attention and MLP."""

from typing import Any

from torch import Tensor

from latte.extend.families.base import Family, register
from latte.layers.linear import split_heads


@register
class Olmo2(Family):
    model_types = ("olmo2",)

    def queries_and_keys(self, attention: Any, x_BTD: Tensor, config: Any) -> tuple[Tensor, Tensor]:
        heads, groups, _ = self.heads(config)
        q_BTD, k_BTD = attention.q_norm(attention.q_proj(x_BTD)), attention.k_norm(attention.k_proj(x_BTD))
        return split_heads(q_BTD, heads), split_heads(k_BTD, groups)
