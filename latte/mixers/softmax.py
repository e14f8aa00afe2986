"""Full softmax attention with rotary encoding: the quadratic baseline, and what pretrained models have."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from latte.mixers.base import Mixer, MixerConfig, register
from latte.mixers.layers import Linear, split_heads
from latte.mixers.rotary import rotate, rotate_from_start
from latte.ops import AttentionState, softmax_attention
from latte.ops.softmax import require_attention_state
from latte.ops.tokens import positions
from latte.shapes import require_divides
from latte.state import State


@register("softmax")
class SoftmaxMixer(Mixer):
    """y_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s, equation (1) per head. Its state grows with every token."""

    @dataclass(frozen=True)
    class Options:
        rope: bool = True

    normalised = True
    directions = ("causal", "bidirectional")
    constant_state = False
    examples = ({}, {"rope": False, "num_key_value_heads": 1}, {"bidirectional": True})

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        if self.options.rope:
            require_divides("mixer 'softmax'", 2, config.width, "channels in a pair", "head width")
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.width)
        self.k_proj = Linear(config.hidden_size, config.kv_heads * config.width)
        self.v_proj = Linear(config.hidden_size, config.kv_heads * config.width)
        self.o_proj = Linear(config.num_heads * config.width, config.hidden_size, residual=True)

    def values(self, x_BTD: Tensor) -> Tensor:
        return split_heads(self.v_proj(x_BTD), self.config.kv_heads)

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.o_proj(y_BTHV.flatten(2))

    def init_state(self, like_BTD: Tensor) -> AttentionState:
        return AttentionState.empty(like_BTD, self.config.kv_heads, self.config.width, self.config.width)

    def mix(
        self,
        x_BTD: Tensor,
        values_BTGV: Tensor | None,
        state: State | None,
        mask: Tensor | None,
        reset: Tensor | None,
    ) -> tuple[Tensor, State | None]:
        config = self.config
        before = require_attention_state("mixer 'softmax'", state, self.init_state(x_BTD))
        q_BTHK = split_heads(self.q_proj(x_BTD), config.num_heads)
        k_BTGK = split_heads(self.k_proj(x_BTD), config.kv_heads)
        if self.options.rope and state is None and mask is None and reset is None:
            q_BTHK, k_BTGK = (rotate_from_start(x, config.rope_theta) for x in (q_BTHK, k_BTGK))
        elif self.options.rope:
            place_BT, _ = positions(x_BTD, mask, reset, before.count_B)
            q_BTHK, k_BTGK = (rotate(x, place_BT, config.rope_theta) for x in (q_BTHK, k_BTGK))
        v_BTGV = self.values(x_BTD) if values_BTGV is None else values_BTGV
        return softmax_attention(
            q_BTHK, k_BTGK, v_BTGV, causal=not config.bidirectional, state=state, mask=mask, reset=reset
        )

    def flops_per_token(self, context: int) -> int:
        return super().flops_per_token(context) + 4 * context * self.config.num_heads * self.config.width
