"""Keywords that transformers' own code passes to every model: each is honoured, or refused where it asks for more."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from latte.mixers.options import did_you_mean
from latte.modes import readable

#: Facts about packed rows, read by latte.models.documents; the longest document follows from the others.
PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "max_length_q", "max_length_k")
#: Keywords that may only say what is so anyway.
REDUNDANT = ("cache_position", "token_type_ids", "is_causal", "output_router_logits")


def check_keywords(model: nn.Module, keywords: dict[str, Any], given_BT: Tensor, read: int) -> None:
    """Raise ValueError for a keyword of ``forward`` that is unknown, or asks for what the model does not do.

    Args:
        given_BT: ids or embeddings of the call.
        read: how many columns the cache has read.
    """
    for name, value in keywords.items():
        if name not in PACKING and name not in REDUNDANT:
            parameters = inspect.signature(type(model).forward).parameters.values()
            own = [p.name for p in parameters if p.name != "self" and p.kind is not inspect.Parameter.VAR_KEYWORD]
            known = [*own, *PACKING, *REDUNDANT]
            raise ValueError(
                f"{type(model).__name__} has no argument {name!r}{did_you_mean(name, known)}, "
                f"expected one of {', '.join(own)}"
            )
        if value is not None and (readable(value) if isinstance(value, Tensor) else not torch.compiler.is_compiling()):
            _check_redundant(model, name, value, given_BT, read)


def _check_redundant(model: Any, name: str, value: Any, given_BT: Tensor, read: int) -> None:
    kind = type(model).__name__
    if name == "output_router_logits" and value:
        raise ValueError(f"output_router_logits is {value}, but {kind} has no router: expected False")
    if name == "is_causal" and bool(value) == bool(getattr(model.config, "bidirectional", False)):
        raise ValueError(f"is_causal is {value}, expected {not value}: it is the configuration's `bidirectional`")
    if name == "token_type_ids" and bool((value != 0).any()):
        raise ValueError(f"token_type_ids has types other than 0, but {kind} has one type of token: expected all 0")
    if name == "cache_position":
        expected = torch.arange(read, read + given_BT.shape[1], device=value.device)
        if value.shape != expected.shape or not torch.equal(value, expected.to(value.dtype)):
            last = read + given_BT.shape[1] - 1
            raise ValueError(f"cache_position is {value.tolist()}, expected {read} to {last}, behind what was read")
