"""Linformer (Wang et al., 2020): softmax attention to a fixed number of learned mixtures of the keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, repeat_heads, split_heads
from latte.mixers.base import Preset
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops.numbers import compute_dtype
from latte.state import State
from latte.tokens import Tokens


@register("linformer")
class LinformerMixer(HeadMixer):
    """y_t = sum_n softmax_n(q_t . (E k)_n / sqrt(K)) (F v)_n, (E k)_n = sum_s E_ns k_s: N slots for all tokens s.

    E and F are learned for every place up to ``length``; a shorter document uses the first columns, a longer one is
    refused. Rows of E may have any sign, so the weights of tokens are no probabilities. Source: arXiv 2006.04768; of
    its ways to share, those within a layer: between heads, and between keys and values. Its code for the Long Range
    Arena has no padding mask; here padding is removed before the mixtures, and every document has its own.
    """

    @dataclass(frozen=True)
    class Options:
        length: int = 4096  # of the longest document
        slots: int = 64  # N
        share_heads: bool = True  # one E, and one F, for all heads
        share_values: bool = False  # F = E

    linear_in_values = True
    directions = ("bidirectional",)
    examples = (
        {"length": 80, "slots": 3, "bidirectional": True},
        {"length": 73, "slots": 2, "share_heads": False, "num_key_value_heads": 1, "bidirectional": True},
        {"length": 80, "slots": 5, "share_values": True, "bidirectional": True},
    )
    presets: ClassVar[Mapping[str, Preset] | None] = {
        "linformer": lambda size: {"position_embedding": "learned"},
    }

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        options = self.options
        for name in ("length", "slots"):
            if getattr(options, name) < 1:
                raise ValueError(f"mixer 'linformer': {name} is {getattr(options, name)}, expected at least 1")
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.width)
        self.k_proj = Linear(config.hidden_size, config.kv_heads * config.width)
        shape = (1 if options.share_heads else config.num_heads, options.slots, options.length)
        self.key_mix = nn.Parameter(torch.empty(shape))  # E
        self.value_mix = None if options.share_values else nn.Parameter(torch.empty(shape))  # F
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier, with ``slots`` and ``length`` as the fans."""
        for weight in (self.key_mix, self.value_mix):
            if weight is not None:
                init.normal_(weight, std=(2 / (self.options.slots + self.options.length)) ** 0.5)

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        heads = self.config.num_heads
        q_BTHK = split_heads(self.q_proj(x_BTD), heads)
        k_BTHK = repeat_heads(split_heads(self.k_proj(x_BTD), self.config.kv_heads), heads)
        return tokens.over_documents(self._attend, q_BTHK, k_BTHK, repeat_heads(v_BTGV, heads)), None

    def _attend(self, q_RLHK: Tensor, k_RLHK: Tensor, v_RLHV: Tensor, real_RL: Tensor) -> Tensor:
        """Documents as rows; keys and values are 0 behind their last token."""
        L, H, dtype = q_RLHK.shape[1], q_RLHK.shape[2], compute_dtype(q_RLHK)
        if self.options.length < L:
            raise ValueError(
                f"mixer 'linformer': a document has {L} tokens, expected at most length {self.options.length}"
            )
        key_mix = self.key_mix[:, :, :L].expand(H, -1, -1)
        value_mix = key_mix if self.value_mix is None else self.value_mix[:, :, :L].expand(H, -1, -1)
        k_RHNK = torch.einsum("hnl,rlhk->rhnk", key_mix, k_RLHK)
        v_RHNV = torch.einsum("hnl,rlhv->rhnv", value_mix, v_RLHV)
        logits_RLHN = torch.einsum("rlhk,rhnk->rlhn", q_RLHK, k_RHNK) * q_RLHK.shape[-1] ** -0.5
        weights_RLHN = logits_RLHN.to(dtype).softmax(dim=-1).to(v_RHNV.dtype)
        return torch.einsum("rlhn,rhnv->rlhv", weights_RLHN, v_RHNV).to(v_RLHV.dtype)

    def flops_per_token(self, context: int) -> int:
        """Per token: it enters every slot once, as key and value, and attends to every slot."""
        projections = 2 * sum(module.weight.numel() for module in self.modules() if isinstance(module, Linear))
        return projections + 8 * self.options.slots * self.config.num_heads * self.config.width
