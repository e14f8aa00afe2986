"""Efficient attention (Shen et al., 2021): a softmax over the channels of queries, and one over the places of keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, repeat_heads, split_heads
from latte.mixers.base import Preset
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import bidirectional_latte
from latte.state import State
from latte.tokens import Tokens


@register("efficient")
class EfficientMixer(HeadMixer):
    """y_t = sum_l softmax_l(q_t)[l] sum_s softmax_s(k_s[l]) v_s, over the channels l and all tokens s of the document.

    This is bidirectional Latte, equation (6), whose latents are the key channels: p(l|t) is the softmax of the query,
    p(s|l) that of the keys. A test builds both from the same weights. Source: arXiv 1812.01243, for the pixels of
    images. Its other version, q k / T without a softmax, is left out: its weights are no probabilities. The causal
    form, which the source does not have, is ``latte``.
    """

    @dataclass(frozen=True)
    class Options:
        key_width: int | None = None  # per head; None: head width

    linear_in_values = normalised = True
    directions = ("bidirectional",)
    examples = (
        {"bidirectional": True},
        {"key_width": 3, "num_key_value_heads": 1, "bidirectional": True},
    )
    presets: ClassVar[Mapping[str, Preset] | None] = {
        "efficient": lambda size: {"position_embedding": "learned"},
    }

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        self.key_width = config.width if self.options.key_width is None else self.options.key_width
        if self.key_width < 1:
            raise ValueError(f"mixer 'efficient': key_width is {self.key_width}, expected at least 1")
        self.q_proj = Linear(config.hidden_size, config.num_heads * self.key_width)
        self.k_proj = Linear(config.hidden_size, config.kv_heads * self.key_width)

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        heads = self.config.num_heads
        logits_BTHK = split_heads(self.q_proj(x_BTD), heads)
        wide = torch.float32 if logits_BTHK.dtype in (torch.float16, torch.bfloat16) else None
        p_BTHK = logits_BTHK.softmax(dim=-1, dtype=wide).to(x_BTD.dtype)
        k_BTHK = repeat_heads(split_heads(self.k_proj(x_BTD), self.config.kv_heads), heads)
        return bidirectional_latte(p_BTHK, k_BTHK, repeat_heads(v_BTGV, heads), tokens=tokens), None

    def flops_per_token(self, context: int) -> int:
        return super().flops_per_token(context) + 4 * self.config.num_heads * self.key_width * self.config.width
