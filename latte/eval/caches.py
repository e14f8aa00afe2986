"""What a model has read, as a value: copies that later reading leaves alone, and files without pickle.

Our models keep a state of one size (:class:`~latte.models.LatteCache`), others the keys and values of every token
(:class:`~transformers.DynamicCache`).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from latte.errors import UserError
from latte.models import LatteCache

FORMAT = "latte-keys-values-1"
#: Layers that replace their tensors and never write into them.
GROWING = (DynamicLayer, DynamicSlidingWindowLayer)


def snapshot(cache: Any) -> Any:
    """An equal cache that does not change when this one reads on; free where reading changes no tensor in place."""
    if isinstance(cache, LatteCache):
        return LatteCache(*cache.snapshot())
    if _grows(cache):
        copied = copy.copy(cache)
        copied.layers = [copy.copy(layer) for layer in cache.layers]
        return copied
    return copy.deepcopy(cache)


def forkable(cache: Any) -> bool:
    """Whether :func:`select` takes it: our caches, and keys and values of every token or of a sliding window."""
    return isinstance(cache, LatteCache) or _grows(cache)


def select(cache: Any, rows: Tensor) -> Any:
    """A cache with these rows, each perhaps several times; the given one stays as it is. None of none."""
    if cache is None or isinstance(cache, LatteCache):
        return None if cache is None else cache.select(rows)
    copied = snapshot(cache)
    copied.batch_select_indices(rows)
    return copied


def save_cache(cache: Any, path: Path) -> None:
    """Write a cache to a safetensors file.

    Raises:
        UserError: nothing was read yet, or the cache is of another kind.
    """
    if isinstance(cache, LatteCache):
        cache.save(path)
        return
    if not _grows(cache):
        what = "nothing was read yet" if cache is None else f"a {type(cache).__name__} of this model can't be saved"
        raise UserError(f"the state can't be saved: {what}")
    tensors = {}
    for index, layer in enumerate(cache.layers):
        tensors[f"{index}.keys"], tensors[f"{index}.values"] = layer.keys.contiguous(), layer.values.contiguous()
        tensors[f"{index}.count"] = torch.tensor(layer.get_seq_length())
    safetensors.torch.save_file(tensors, path, metadata={"format": FORMAT})


def load_cache(path: Path, model: Any) -> Any:
    """Read what :func:`save_cache` wrote for this model.

    Raises:
        ValueError: the file is damaged, or holds something else.
    """
    try:
        with safetensors.safe_open(path, framework="pt", device=str(model.device)) as file:
            if (file.metadata() or {}).get("format") != FORMAT:
                return LatteCache.load(path, model.device)
            cache = DynamicCache(config=model.config)
            layers: list[Any] = cache.layers
            for index, layer in enumerate(layers):
                keys, values = file.get_tensor(f"{index}.keys"), file.get_tensor(f"{index}.values")
                layer.lazy_initialization(keys, values)
                layer.keys, layer.values = keys, values
                if isinstance(layer, DynamicSlidingWindowLayer):
                    layer.cumulative_length = int(file.get_tensor(f"{index}.count"))
            return cache
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is not a state of this model: {error}") from error


def _grows(cache: Any) -> bool:
    layers: list[Any] = cache.layers if isinstance(cache, DynamicCache) else []
    return bool(layers) and all(type(layer) in GROWING and layer.is_initialized for layer in layers)
