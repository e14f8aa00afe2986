"""Retention (Sun et al., 2023): rotated linear attention that forgets at a fixed pace per head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, head_norm, split_heads
from latte.layers.rotary import rotary
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import DecayState, decay_attention
from latte.shapes import require_divides
from latte.state import State
from latte.tokens import Tokens


@register("retnet")
class RetNetMixer(HeadMixer):
    """y_t = sum_s gamma_h^{t-s} (q~_t . k~_s) v_s / sqrt(K), gamma_h = 1 - 2^{-5-h}, q~ and k~ turned by their places.

    Outputs are normed per head and gated by swish(x W_g).
    """

    @dataclass(frozen=True)
    class Options:
        value_expansion: int = 2  # value width over hidden_size

    linear_in_values = True
    examples = ({}, {"value_expansion": 1})
    published = {"retnet": (21.59, 197)}  # noqa: RUF012

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        require_divides("mixer 'retnet'", 2, config.width, "channels in a pair", "head width")
        keys = config.num_heads * config.width
        self.q_proj = Linear(config.hidden_size, keys)
        self.k_proj = Linear(config.hidden_size, keys)
        self.gate_proj = Linear(config.hidden_size, config.num_heads * self.value_width)
        self.rotary = rotary(config.width, config.rope_theta)

    def value_shape(self) -> tuple[int, int]:
        return self.config.num_heads, self.options.value_expansion * self.config.width

    def init_state(self, like_BTD: Tensor) -> DecayState:
        return DecayState.empty(like_BTD, self.config.num_heads, self.config.width, self.value_width)

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.o_proj(head_norm(y_BTHV, self.config.norm_eps).flatten(2) * F.silu(self.gate_proj(x_BTD)))

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        config = self.config
        q, k = (split_heads(proj(x_BTD), config.num_heads) for proj in (self.q_proj, self.k_proj))
        q, k = (self.rotary.turn(x, tokens) for x in (q, k * config.width**-0.5))
        heads = torch.arange(config.num_heads, dtype=q.dtype, device=q.device)
        log_decay_H = torch.log1p(-torch.exp2(-5 - heads))
        return decay_attention(q, k, v_BTGV, log_decay_H, state=state, tokens=tokens)
