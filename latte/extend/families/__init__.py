"""Families of pretrained models that can be extended, one short file each."""

from latte.extend.families import gemma2, llama, mistral, qwen2, qwen3  # noqa: F401  (importing registers them)
from latte.extend.families.base import Family, family_of, register

__all__ = ["Family", "family_of", "register"]
