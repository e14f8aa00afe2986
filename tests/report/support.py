"""Small models with a tokenizer, as a folder and as objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from latte.data.tokenizer import train_bpe
from latte.models import LatteConfig, LatteForCausalLM, preset

TEXT = '''def merge(left, right):
    """Join two sorted lists; <b>nothing</b> is lost & the order stays."""
    result = []
    while left and right:
        source = left if left[0] <= right[0] else right
        result.append(source.pop(0))
    return result + left + right  # naïve, "quadratic" </script>
'''


def tokenizer() -> Any:
    return train_bpe([TEXT], 300)


def config(variant: str = "latte-r-swa++", **overrides: Any) -> LatteConfig:
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 300,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,  # sharp weights, so that mistakes are visible
    }
    if variant.startswith("latte"):
        sizes["num_latents"] = 16
    if "swa" in variant:
        sizes["window"] = 6
    return preset(variant, "tiny", **{**sizes, **overrides})


def model(variant: str = "latte-r-swa++", **overrides: Any) -> LatteForCausalLM:
    torch.manual_seed(0)
    return LatteForCausalLM(config(variant, **overrides)).eval()


def saved(folder: Path, variant: str = "latte-r-swa++") -> Path:
    """A folder with a model and its tokenizer."""
    model(variant).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
