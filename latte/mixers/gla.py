"""Gated linear attention (Yang et al., 2024): a matrix state whose key channels forget at a pace of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from latte.mixers.base import Mixer, MixerConfig, register
from latte.mixers.layers import Linear, head_norm, split_heads
from latte.ops import DecayState, decay_attention
from latte.shapes import require_divides
from latte.state import State, require_state


@register("gla")
class GLAMixer(Mixer):
    """S_t = diag(alpha_t) S_{t-1} + k_t v_t^T, y_t = q_t^T S_t / sqrt(K), alpha_t = sigmoid(x_t W_1 W_2 + b)^(1/tau).

    Keys are half as wide as values; outputs are normed per head and gated by swish(x W_g).
    """

    @dataclass(frozen=True)
    class Options:
        key_fraction: float = 0.5  # key width over hidden_size
        gate_rank: int = 16
        gate_temperature: float = 16.0  # tau

    examples = ({}, {"key_fraction": 1.0, "gate_rank": 4, "gate_temperature": 1.0})

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        width = int(config.hidden_size * self.options.key_fraction)
        require_divides("mixer 'gla'", config.num_heads, width, "num_heads", "key width")
        self.key_width = width // config.num_heads
        value_width = config.num_heads * config.width
        self.q_proj = Linear(config.hidden_size, width)
        self.k_proj = Linear(config.hidden_size, width)
        self.v_proj = Linear(config.hidden_size, value_width)
        self.decay_proj = nn.Sequential(
            Linear(config.hidden_size, self.options.gate_rank), nn.Linear(self.options.gate_rank, width)
        )
        self.gate_proj = Linear(config.hidden_size, value_width)
        self.o_proj = Linear(value_width, config.hidden_size, residual=True)

    def init_state(self, like_BTD: Tensor) -> DecayState:
        return DecayState.empty(like_BTD, self.config.num_heads, self.key_width, self.config.width)

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.o_proj(head_norm(y_BTHV, self.config.norm_eps).flatten(2) * F.silu(self.gate_proj(x_BTD)))

    def mix(
        self,
        x_BTD: Tensor,
        values_BTGV: Tensor | None,
        state: State | None,
        mask: Tensor | None,
        reset: Tensor | None,
    ) -> tuple[Tensor, State | None]:
        before = None if state is None else require_state("mixer 'gla'", state, self.init_state(x_BTD))
        log_decay = F.logsigmoid(self.decay_proj(x_BTD).to(x_BTD.dtype)) / self.options.gate_temperature
        q, k, v, g = (
            split_heads(y, self.config.num_heads)
            for y in (self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD), log_decay)
        )
        return decay_attention(q * self.key_width**-0.5, k, v, g, state=before, mask=mask, reset=reset)
