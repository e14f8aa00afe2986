"""Griffin (De et al., 2024): a recurrent block around the RG-LRU, and local attention with one key head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.config import MixerConfig
from latte.layers.feeds import RGLRU
from latte.layers.linear import Linear, TokenLinear, split_heads
from latte.layers.marks import Mark
from latte.layers.rotary import Rotary, rotary
from latte.mixers.base import Mixer, Preset, Size
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import ConvState, ScanState, WindowState, causal_conv, window_attention
from latte.shapes import require_divides
from latte.state import State, state
from latte.tokens import Tokens


@state
class GriffinState(State):
    conv: ConvState
    lru: ScanState


def _preset(size: Size) -> dict[str, Any]:
    """Two recurrent blocks, then one of local attention, each with a gated GELU MLP."""
    local = {"mixer": "local-attention", "options": {"window": size.window}}
    return {
        "pattern": [["mixer", "geglu"], ["mixer", "geglu"], [local, "geglu"]],
        "num_key_value_heads": 1,
    }


@register("griffin")
class GriffinMixer(Mixer):
    """out = W_o (RG-LRU(conv(W_x u)) . gelu(W_y u)), every projection with a bias; u is the input.

        r_t = sigmoid(W_a x_t + b_a)    i_t = sigmoid(W_i x_t + b_i)    a_t = e^{-8 softplus(Lambda) r_t}
        h_t = a_t . h_{t-1} + sqrt(1 - a_t^2) . (i_t . x_t)

    W_a and W_i have num_heads blocks. The paper's a^8 starts in [0.9, 0.999], the released code's a: ``radius`` says
    which, "power" or "base". Sources: arXiv 2402.19427 and recurrentgemma. Norms scale by a weight, there by 1 + it.
    """

    @dataclass(frozen=True)
    class Options:
        lru_width: int | None = None  # None: hidden_size
        conv_size: int = 4
        radius: Literal["base", "power"] = "base"

    examples = ({}, {"lru_width": 12, "conv_size": 2, "radius": "power"})
    presets: ClassVar[Mapping[str, Preset] | None] = {"griffin": _preset}
    published = {"griffin": (18.83, 139)}  # noqa: RUF012
    marks: ClassVar[Mapping[str, Mark]] = {"conv_bias": Mark(decay=False)}

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        options, D = self.options, config.hidden_size
        self.width = D if options.lru_width is None else options.lru_width
        require_divides("mixer 'griffin'", config.num_heads, self.width, "num_heads", "lru_width")
        if options.conv_size < 1:
            raise ValueError(f"mixer 'griffin': conv_size is {options.conv_size}, expected at least 1")
        self.y_proj, self.x_proj = TokenLinear(D, self.width), TokenLinear(D, self.width)
        self.conv_weight = nn.Parameter(torch.empty(self.width, options.conv_size))
        self.conv_bias = nn.Parameter(torch.empty(self.width))
        self.lru = RGLRU(self.width, config.num_heads, options.radius)
        self.out_proj = TokenLinear(self.width, D)
        self.out_proj.residual = True  # type: ignore[assignment]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.normal_(self.conv_weight, std=math.sqrt(0.01 / self.options.conv_size))
        init.zeros_(self.conv_bias)

    def init_state(self, like_BTD: Tensor) -> GriffinState:
        return GriffinState(
            ConvState.empty(like_BTD, self.options.conv_size, self.width), self.lru.init_state(like_BTD)
        )

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        gate_BTD = F.gelu(self.y_proj(x_BTD).to(x_BTD.dtype), approximate="tanh")
        u_BTD = self.x_proj(x_BTD).to(x_BTD.dtype)
        u_BTD, conv = causal_conv(u_BTD, self.conv_weight, self.conv_bias, state=state.conv, tokens=tokens)
        h_BTD, lru = self.lru(u_BTD, state.lru, tokens)
        assert isinstance(lru, ScanState)
        return tokens.zero_padding(self.out_proj(h_BTD * gate_BTD).to(x_BTD.dtype)), GriffinState(conv, lru)


@register("local-attention")
class LocalAttentionMixer(HeadMixer):
    """y_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s over t - window <= s <= t, then W_o with a bias.

    Of q and k the first half of the channels is turned by the token's place. With num_key_value_heads 1 it is
    Griffin's multi-query attention. Linear time and a state of one size.
    """

    @dataclass(frozen=True)
    class Options:
        window: int = 1024

    linear_in_values = normalised = True
    examples = ({"window": 3, "num_key_value_heads": 1}, {"window": 20, "num_heads": 2, "head_dim": 8})
    presets: ClassVar[Mapping[str, Preset] | None] = {}  # a part of Griffin's

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        if self.options.window < 0:
            raise ValueError(f"mixer 'local-attention': window is {self.options.window}, expected at least 0")
        require_divides("mixer 'local-attention'", 4, config.width, "two halves of pairs", "head width")
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.width)
        self.k_proj = Linear(config.hidden_size, config.kv_heads * config.width)
        self.out_bias = nn.Parameter(torch.zeros(config.hidden_size))
        self.rotary: Rotary = rotary(config.width // 2, config.rope_theta)

    def init_state(self, like_BTD: Tensor) -> WindowState:
        width = self.config.width
        return WindowState.empty(like_BTD, self.options.window, 0, self.config.kv_heads, width, width)

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return super().project(y_BTHV, x_BTD) + self.out_bias

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        y_BTD, after = super().mix(x_BTD, state, tokens)
        return tokens.zero_padding(y_BTD), after  # the bias stands at padding too

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        q_BTHK = self._turned(split_heads(self.q_proj(x_BTD), self.config.num_heads), tokens)
        k_BTGK = self._turned(split_heads(self.k_proj(x_BTD), self.config.kv_heads), tokens)
        left = self.options.window
        y_BTHV, _, after = window_attention(q_BTHK, k_BTGK, v_BTGV, left=left, state=state, tokens=tokens)
        return y_BTHV, after

    def _turned(self, x_BTHK: Tensor, tokens: Tokens) -> Tensor:
        first, second = x_BTHK.chunk(2, dim=-1)
        return torch.cat([self.rotary.turn(first, tokens), second], dim=-1)

    def flops_per_token(self, context: int) -> int:
        seen = min(context, self.options.window) + 1
        return super().flops_per_token(context) + 4 * seen * self.config.num_heads * self.config.width
