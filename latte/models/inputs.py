"""What a model is called with, as :class:`latte.tokens.Tokens`: built here, once a call, for all layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from latte.models.cache import LatteCache
from latte.shapes import Axes
from latte.tokens import Tokens


def embed(table: nn.Module, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """The input as (B, T, D).

    Raises:
        ValueError: both or neither were given, or no tokens.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("both or neither of input_ids and inputs_embeds were given, expected exactly one")
    x_BTD = table(input_ids) if inputs_embeds is None else inputs_embeds
    Axes("model").bind("input", x_BTD, "BTD")
    return x_BTD


def tokens_of(x_BTD: Tensor, attention_mask: Tensor | None, reset: Tensor | None, cache: LatteCache | None) -> Tokens:
    """The tokens of a call, behind those that the cache has read.

    Raises:
        ValueError: masks that do not fit, or a cache of another batch.
    """
    start = None if cache is None else cache.count_for(x_BTD)
    return Tokens.of(x_BTD, mask=padding_mask(attention_mask, x_BTD), reset=reset, start=start, where="model")


def padding_mask(attention_mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """The (B, T) boolean mask of these tokens, or None where none is padding."""
    if attention_mask is None:
        return None
    B, T = tokens.shape[:2]
    if attention_mask.dim() != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, expected ({B}, {T}), or more columns with a cache"
        )
    mask = attention_mask[:, attention_mask.shape[1] - T :].to(torch.bool)
    # Without padding every op has a shorter way; while compiling, looking would break the graph.
    return None if not torch.compiler.is_compiling() and bool(mask.all()) else mask
