"""Timing single-token decoding behind a context: caches to start from, and the clock around each token."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


def random_ids(model: Any, count: int) -> Tensor:
    """One row of ``count`` random tokens, the same in every call: (1, count)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.config.vocab_size, (1, count), generator=generator).to(model.device)


@torch.no_grad()
def read_context(model: Any, ids_BT: Tensor, chunk: int) -> Any:
    """The model's cache after reading ``ids_BT``, ``chunk`` tokens at a time."""
    cache = None
    for part_BT in ids_BT.split(chunk, dim=1):
        cache = model(part_BT, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    return cache


@torch.no_grad()
def random_cache(model: Any, context: int) -> DynamicCache:
    """A key-value cache of ``context`` tokens, for models of full attention.

    Its keys and values are random: reading the context would take quadratic time, and the time of a token does not
    depend on what the cache contains.
    """
    first = model(random_ids(model, 1), use_cache=True).past_key_values
    cache = DynamicCache()
    for index, layer in enumerate(first.layers):
        B, G, _, K = layer.keys.shape
        keys, values = (
            torch.randn(B, G, context, K, dtype=layer.keys.dtype, device=layer.keys.device) for _ in range(2)
        )
        cache.update(keys, values, index)
    return cache


def engine_of(cache: Any) -> str:
    """What decoded the last token of a cache: "kernel", one native call a token, or "modules", torch layer by layer."""
    return "kernel" if getattr(cache, "session", None) is not None else "modules"


@torch.no_grad()
def time_tokens(model: Any, cache: Any, ids_BT: Tensor) -> tuple[list[float], Any]:
    """Seconds that each token of ``ids_BT`` takes when they are read one at a time, and the cache after the last."""
    seconds = []
    for token_BT in ids_BT.split(1, dim=1):
        began = time.perf_counter()
        cache = model(token_BT, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        seconds.append(time.perf_counter() - began)
    return seconds, cache
