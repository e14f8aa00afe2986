"""Small models of every variant, and their tokens one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from latte.models import LatteCache, LatteConfig, LatteForCausalLM, preset, variants
from latte.models.presets import shared_overrides

#: Every preset of a causal mechanism: models of any mechanism behave alike.
VARIANTS = [name for name, (mixer, _) in variants().items() if "causal" in mixer.directions]


def tiny_config(variant: str, **overrides: Any) -> LatteConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 97,
        "max_position_embeddings": 64,
    }
    wanted = {**sizes, "window": 5, "num_latents": 8, "state_size": 4, "num_blocks": 1}
    return preset(variant, "tiny", **{**shared_overrides(variant, "tiny", wanted), **overrides})


def tiny_model(variant: str, **overrides: Any) -> LatteForCausalLM:
    torch.manual_seed(0)
    # Larger weights than at the start of training, so that mistakes are visible in the logits.
    return LatteForCausalLM(tiny_config(variant, initializer_range=0.2, **overrides)).eval()


def token_ids(rows: int, tokens: int, seed: int = 1, vocabulary: int = 97) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def decode(model: LatteForCausalLM, ids: Tensor, cache: LatteCache, **settings) -> Tensor:
    """Logits of all tokens, read one by one."""
    parts = [model(part, past_key_values=cache, **settings).logits for part in ids.split(1, dim=1)]
    return torch.cat(parts, dim=1)


def both_ways(
    model: LatteForCausalLM, ids: Tensor, cache: LatteCache, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor, LatteCache, LatteCache]:
    """Logits with the kernels and without, and both caches after it."""
    other = cache.fork()
    got = decode(model, ids, cache)
    monkeypatch.setenv("LATTE_BACKEND", "torch")
    wanted = decode(model, ids, other)
    monkeypatch.delenv("LATTE_BACKEND")
    return got, wanted, cache, other
