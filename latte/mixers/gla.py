"""Gated linear attention (Yang et al., 2024): a matrix state whose key channels forget at a pace of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, TokenLinear, head_norm, split_heads
from latte.mixers.base import View
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import DecayState, decay_attention
from latte.shapes import require_divides
from latte.state import State
from latte.tokens import Tokens


@register("gla")
class GLAMixer(HeadMixer):
    """S_t = diag(alpha_t) S_{t-1} + k_t v_t^T, y_t = q_t^T S_t / sqrt(K), alpha_t = sigmoid(x_t W_1 W_2 + b)^(1/tau).

    Keys are half as wide as values; outputs are normed per head and gated by swish(x W_g).
    """

    @dataclass(frozen=True)
    class Options:
        key_fraction: float = 0.5  # key width over hidden_size
        gate_rank: int = 16
        gate_temperature: float = 16.0  # tau

    linear_in_values = True
    examples = ({}, {"key_fraction": 1.0, "gate_rank": 4, "gate_temperature": 1.0})
    published = {"gla": (19.10, 206)}  # noqa: RUF012

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        width = int(config.hidden_size * self.options.key_fraction)
        require_divides("mixer 'gla'", config.num_heads, width, "num_heads", "key width")
        self.key_width = width // config.num_heads
        self.q_proj = Linear(config.hidden_size, width)
        self.k_proj = Linear(config.hidden_size, width)
        self.decay_proj = nn.Sequential(
            Linear(config.hidden_size, self.options.gate_rank), TokenLinear(self.options.gate_rank, width)
        )
        self.gate_proj = Linear(config.hidden_size, config.num_heads * config.width)

    def value_shape(self) -> tuple[int, int]:
        return self.config.num_heads, self.config.width

    def init_state(self, like_BTD: Tensor) -> DecayState:
        return DecayState.empty(like_BTD, self.config.num_heads, self.key_width, self.config.width)

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.o_proj(head_norm(y_BTHV, self.config.norm_eps).flatten(2) * F.silu(self.gate_proj(x_BTD)))

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        """log alpha (B, T, H, K)."""
        log_alpha = F.logsigmoid(self.decay_proj(x_BTD).to(x_BTD.dtype)) / self.options.gate_temperature
        return split_heads(log_alpha, self.config.num_heads)

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        q, k = (split_heads(proj(x_BTD), self.config.num_heads) for proj in (self.q_proj, self.k_proj))
        scaled = q * self.key_width**-0.5
        return decay_attention(scaled, k, v_BTGV, self.log_decay(x_BTD), state=state, tokens=tokens)

    def look(self, x_BTD: Tensor, tokens: Tokens | None = None) -> dict[str, View]:
        return super().look(x_BTD, tokens) | {"gates": View("channels", self.log_decay(x_BTD).exp(), False)}
