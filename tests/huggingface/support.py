"""Small models of our own layers and an extended one, which behave alike towards transformers."""

from __future__ import annotations

from typing import Any

import pytest

from latte.extend import convert
from tests.extend.families import small_model
from tests.models.support import tiny_model

KINDS = ("own", "extended")
each_kind = pytest.mark.parametrize("kind", KINDS)


def language_model(kind: str, **overrides: Any) -> Any:
    """A causal language model in eval mode with at least 61 tokens, all its parameters trainable."""
    if kind == "own":
        return tiny_model("latte-r-swa++", **overrides)
    model = convert(small_model("llama"), {"window": 5, "num_latents": 2, "feed": "rglru"}).eval()
    for name, value in overrides.items():
        setattr(model.config, name, value)
    return model
