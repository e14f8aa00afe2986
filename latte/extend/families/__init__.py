"""Families of pretrained models that can be extended, one short file each."""

from latte.extend.families import (  # noqa: F401  (importing registers them)
    gemma2,
    gemma3,
    granite,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from latte.extend.families.base import Family, family_of, register

__all__ = ["Family", "family_of", "register"]
