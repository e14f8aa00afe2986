"""Qwen 3: queries and keys are normed head by head before they are turned."""

from typing import Any

from torch import Tensor

from latte.extend.families.base import Family, Shape, register


@register
class Qwen3(Family):
    model_types = ("qwen3",)
    shape = Shape(heads=("q_norm", "k_norm"))

    def queries_and_keys(self, attention: Any, x_BTD: Tensor, config: Any) -> tuple[Tensor, Tensor]:
        q_BTHK, k_BTGK = super().queries_and_keys(attention, x_BTD, config)
        return attention.q_norm(q_BTHK), attention.k_norm(k_BTGK)
