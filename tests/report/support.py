"""Small models with a tokenizer, as a folder and as objects."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
import yaml

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


def make_run(folder: Path, variant: str = "latte-r-swa++", finished: bool = True) -> Path:
    """A run's folder as training leaves it."""
    folder.mkdir(parents=True)
    recipe = {
        "out": str(folder),
        "data": {"source": "python-stdlib", "tokenizer": "bpe", "vocab_size": 300, "sequence_length": 32},
        "model": {"variant": variant, "size": "tiny"},
        "train": {"steps": 40, "batch_size": 4, "seed": 0},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(recipe))
    lines: list[dict[str, Any]] = []
    for step in range(10, 50, 10):
        lines.append({"step": step, "loss": 5 - step / 20, "tokens": step * 128, "tokens_per_second": 900.0})
    lines.append({"step": 40, "valid_loss": 3.25})
    # A kill may leave half a line behind.
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5')
    if finished:
        saved(folder / "model", variant)
        result = {"steps": 40, "parameters": 12345, "tokens": 5120, "valid_loss": 3.25, "seconds": 5.0}
        result |= {"tokens_per_second": 1024.0, "peak_memory_bytes": 2**28}
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def page_data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])
