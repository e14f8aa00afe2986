"""What a model is called with, as :class:`latte.tokens.Tokens`: built here, once a call, for all layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from latte.models.cache import LatteCache
from latte.models.documents import document_starts
from latte.models.keywords import check_keywords
from latte.modes import values_hidden
from latte.shapes import Axes
from latte.tokens import Tokens


def embed(table: nn.Module, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """The input as (B, T, D).

    Raises:
        ValueError: both or neither were given, or no tokens.
    """
    given_tokens(input_ids, inputs_embeds)
    x_BTD = table(input_ids) if inputs_embeds is None else inputs_embeds
    Axes("model").bind("input", x_BTD, "BTD")
    return x_BTD


def given_tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """Ids (B, T) or embeddings (B, T, D), whichever was given.

    Raises:
        ValueError: both or neither were given.
    """
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("both or neither of input_ids and inputs_embeds were given, expected exactly one")
    given = input_ids if inputs_embeds is None else inputs_embeds
    assert given is not None
    return given


def resets_of(
    model: nn.Module,
    given_BT: Tensor,
    attention_mask: Tensor | None,
    reset: Tensor | None,
    position_ids: Tensor | None,
    cache: LatteCache | None,
    keywords: dict[str, Any],
) -> Tensor | None:
    """Where documents begin, from ``reset``, ``position_ids`` and the keywords of packing collators.

    Raises:
        ValueError: keywords that no model here knows, or facts that contradict each other or the cache.
    """
    if cache is not None and not isinstance(cache, LatteCache):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}, expected a LatteCache or None: "
            "the layers keep states of one size instead of keys and values"
        )
    if keywords:
        check_keywords(model, keywords, given_BT, 0 if cache is None else cache.length)
    packed = {name: keywords.get(name) for name in ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")}
    if position_ids is None and all(value is None for value in packed.values()):
        return reset
    mask, start = padding_mask(attention_mask, given_BT), None if cache is None else cache.count_for(given_BT)
    return document_starts(given_BT, mask, start, reset, position_ids, **packed)


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
    # Without padding every op has a shorter way; while compiling or transforming, looking would break the graph.
    return None if not values_hidden(mask) and bool(mask.all()) else mask
