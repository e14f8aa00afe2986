"""Retention (Sun et al., 2023): rotated linear attention that forgets at a fixed pace per head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.mixers.base import Mixer, MixerConfig, register
from latte.mixers.layers import Linear, head_norm, split_heads
from latte.mixers.rotary import rotate
from latte.ops import DecayState, decay_attention
from latte.ops.tokens import positions
from latte.shapes import require_divides
from latte.state import State, require_state, state


@state
class RetNetState(State):
    retained: DecayState
    count_B: Tensor


@register("retnet")
class RetNetMixer(Mixer):
    """y_t = sum_s gamma_h^{t-s} (q~_t . k~_s) v_s / sqrt(K), gamma_h = 1 - 2^{-5-h}, q~ and k~ turned by their places.

    Outputs are normed per head and gated by swish(x W_g).
    """

    @dataclass(frozen=True)
    class Options:
        value_expansion: int = 2  # value width over hidden_size

    examples = ({}, {"value_expansion": 1})

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        require_divides("mixer 'retnet'", 2, config.width, "channels in a pair", "head width")
        self.value_width = self.options.value_expansion * config.width
        keys, values = config.num_heads * config.width, config.num_heads * self.value_width
        self.q_proj = Linear(config.hidden_size, keys)
        self.k_proj = Linear(config.hidden_size, keys)
        self.v_proj = Linear(config.hidden_size, values)
        self.gate_proj = Linear(config.hidden_size, values)
        self.o_proj = Linear(values, config.hidden_size, residual=True)

    def init_state(self, like_BTD: Tensor) -> RetNetState:
        count_B = torch.zeros(like_BTD.shape[0], dtype=torch.long, device=like_BTD.device)
        return RetNetState(
            DecayState.empty(like_BTD, self.config.num_heads, self.config.width, self.value_width), count_B
        )

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
        config = self.config
        before = require_state("mixer 'retnet'", state, self.init_state(x_BTD))
        q, k, v = (split_heads(proj(x_BTD), config.num_heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        place_BT, count_B = positions(x_BTD, mask, reset, before.count_B)
        q, k = (rotate(x, place_BT, config.rope_theta) for x in (q, k * config.width**-0.5))
        heads = torch.arange(config.num_heads, dtype=q.dtype, device=q.device)
        log_decay_H = torch.log1p(-torch.exp2(-5 - heads))
        y_BTHV, retained = decay_attention(q, k, v, log_decay_H, state=before.retained, mask=mask, reset=reset)
        return y_BTHV, RetNetState(retained, count_B)
