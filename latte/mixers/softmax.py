"""Full softmax attention with rotary encoding: the quadratic baseline, and what pretrained models have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, split_heads
from latte.layers.rotary import rotary
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import AttentionState, softmax_attention
from latte.shapes import require_divides
from latte.state import State
from latte.tokens import Tokens


@register("softmax")
class SoftmaxMixer(HeadMixer):
    """y_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s, equation (1) per head. Its state grows with every token."""

    @dataclass(frozen=True)
    class Options:
        rope: bool = True

    linear_in_values = normalised = True
    directions = ("causal", "bidirectional")
    examples = ({}, {"rope": False, "num_key_value_heads": 1}, {"bidirectional": True})
    presets = {"transformer++": lambda size: {}}  # noqa: RUF012
    published = {"transformer++": (17.19, 151)}  # noqa: RUF012

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        if self.options.rope:
            require_divides("mixer 'softmax'", 2, config.width, "channels in a pair", "head width")
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.width)
        self.k_proj = Linear(config.hidden_size, config.kv_heads * config.width)
        self.rotary = rotary(config.width, config.rope_theta) if self.options.rope else None

    def init_state(self, like_BTD: Tensor) -> AttentionState:
        return AttentionState.empty(like_BTD, self.config.kv_heads, self.config.width, self.config.width)

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        q_BTHK = split_heads(self.q_proj(x_BTD), self.config.num_heads)
        k_BTGK = split_heads(self.k_proj(x_BTD), self.config.kv_heads)
        if self.rotary is not None:
            q_BTHK, k_BTGK = (self.rotary.turn(x, tokens) for x in (q_BTHK, k_BTGK))
        causal = not self.config.bidirectional
        return softmax_attention(q_BTHK, k_BTGK, v_BTGV, causal=causal, state=state, tokens=tokens)

    def flops_per_token(self, context: int) -> int:
        return super().flops_per_token(context) + 4 * context * self.config.num_heads * self.config.width
