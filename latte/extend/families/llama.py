"""Llama and the models that keep its shape, SmolLM2 among them."""

from latte.extend.families.base import Family, register


@register
class Llama(Family):
    model_types = ("llama",)
    like_llama = True
