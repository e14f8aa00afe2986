"""Llama and the models that keep its shape, SmolLM2 among them."""

from latte.extend.families.base import Family, Shape, register


@register
class Llama(Family):
    model_types = ("llama",)
    shape = Shape()
