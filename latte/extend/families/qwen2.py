"""Qwen 2 and 2.5: queries, keys and values have biases, which their projections carry; late layers may have windows."""

from latte.extend.families.base import Family, Shape, register


@register
class Qwen2(Family):
    model_types = ("qwen2",)
    shape = Shape()
