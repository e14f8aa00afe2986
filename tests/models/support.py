"""Small models of every variant."""

from __future__ import annotations

from typing import Any

import torch

from latte.models import LatteConfig, LatteForCausalLM, preset


def tiny_config(variant: str, **overrides: Any) -> LatteConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 97,
        "max_position_embeddings": 64,
    }
    if variant != "transformer++":
        sizes["window"] = 5 if "swa" in variant else None
        if variant != "r-swa++":
            sizes["num_latents"] = 8
        if sizes["window"] is None:
            del sizes["window"]
    return preset(variant, "tiny", **{**sizes, **overrides})


def tiny_model(variant: str, **overrides: Any) -> LatteForCausalLM:
    torch.manual_seed(0)
    # Larger weights than at the start of training, so that mistakes are visible in the logits.
    return LatteForCausalLM(tiny_config(variant, initializer_range=0.2, **overrides)).eval()


def token_ids(rows: int, tokens: int, seed: int = 1, vocabulary: int = 97) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(seed))
