"""A model with weights of 8 or 4 bits: its projections, embedding and head in blocks, everything else in floats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from latte.layers.linear import Linear, TokenLinear
from latte.layers.quantized import KINDS, Quantized, QuantizedEmbedding, QuantizedLinear, quantized_linear
from latte.ops.blocks import FORMATS, pack

#: Projections that become blocks: classes whose call is nothing but the product with their weight.
PROJECTIONS = (Linear, TokenLinear, nn.Linear)


def quantize_model(model: Any, weights: str) -> Any:
    """Turn a causal language model's weights into blocks of ``"int8"`` or ``"int4"``, in place; returns the model.

    Matrices whose rows are no whole blocks stay floats.

    Raises:
        ValueError: another name, or weights that are quantised already or not finite.
    """
    if weights not in KINDS:
        raise ValueError(f"weights is {weights!r}, expected one of {', '.join(KINDS)}")
    if any(isinstance(module, Quantized) for module in model.modules()):
        raise ValueError("the model's weights are quantised already, expected floating point")
    inside, ends = KINDS[weights]
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    paths: dict[str, str] = {}
    for path, module in list(model.named_modules()):
        if module is head or type(module) not in PROJECTIONS or module.in_features % FORMATS[inside].numbers:
            continue
        replace_module(model, path, quantized_linear(module, inside))
        paths[path] = inside
    if table.embedding_dim % FORMATS[ends].numbers == 0 and isinstance(table, nn.Embedding):
        tied = head.weight is table.weight
        scale = float(getattr(table, "embed_scale", 1.0))
        blocks = pack(table.weight, ends)
        new = QuantizedEmbedding(table.num_embeddings, table.embedding_dim, ends, blocks, scale)
        paths[_set(model, table, new)] = ends
        if type(head) in PROJECTIONS:
            own = blocks if tied else pack(head.weight, ends)
            paths[_set(model, head, QuantizedLinear(head.in_features, head.out_features, ends, own, head.bias))] = ends
    remember(model, paths)
    return model.requires_grad_(False)


def make_quantized(model: Any, paths: Mapping[str, str]) -> None:
    """Put empty blocks of these kinds in the place of modules: what a saved quantised model is loaded into.

    Raises:
        ValueError: a module that is not there, or blocks of a kind that is not known.
    """
    modules = dict(model.named_modules())
    for path, kind in paths.items():
        module: Any = modules.get(path)
        if module is None or kind not in FORMATS:
            raise ValueError(
                f"the configuration has weights {path!r} of {kind!r}, expected modules of the model and one of "
                + ", ".join(FORMATS)
            )
        new: Quantized
        if isinstance(module, nn.Embedding):
            scale = float(getattr(module, "scalar_embed_scale", 1.0))
            new = QuantizedEmbedding(module.num_embeddings, module.embedding_dim, kind, scale=scale)
        else:
            new = QuantizedLinear(module.in_features, module.out_features, kind, bias=module.bias)
        replace_module(model, path, new)
    remember(model, paths)


def remember(model: Any, paths: Mapping[str, str]) -> None:
    """Note the blocks in the configuration, so that a saved model is loaded as it is."""
    if not hasattr(type(model.config), "quantized"):
        return  # not a model of ours: it can't be saved in blocks
    model.config.quantized = dict(paths)
    model._tied_weights_keys, model.all_tied_weights_keys = None, {}  # transformers ties parameters only
    tie_blocks(model)


def tie_blocks(model: Any) -> None:
    """Head and embedding share their blocks where the configuration ties them; the file has them once."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    both = isinstance(head, QuantizedLinear) and isinstance(table, QuantizedEmbedding)
    if both and model.config.tie_word_embeddings:
        head._non_persistent_buffers_set.add("blocks")
        head.blocks = table.blocks


def _set(model: Any, old: nn.Module, new: nn.Module) -> str:
    """Replace a module wherever it is; its first path."""
    paths = [path for path, module in model.named_modules(remove_duplicate=False) if module is old]
    for path in paths:
        replace_module(model, path, new)
    return paths[0]


def replace_module(model: Any, path: str, new: nn.Module) -> None:
    """Put a module in the place of another."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent) if parent else model, name, new.train(model.training))
