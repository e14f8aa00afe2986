"""Mistral: Llama's shape, with a sliding window of its own in the first generation."""

from latte.extend.families.base import Family, register


@register
class Mistral(Family):
    model_types = ("mistral",)
    like_llama = True
