"""Mistral: Llama's shape, with a sliding window of its own in the first generation."""

from latte.extend.families.base import Family, Shape, register


@register
class Mistral(Family):
    model_types = ("mistral",)
    shape = Shape()
