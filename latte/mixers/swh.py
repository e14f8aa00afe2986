"""Spectral-window hybrid (2026): a damped cosine over the whole past, beside a window of softmax attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, RMSNorm, TokenLinear, split_heads
from latte.layers.marks import Mark
from latte.layers.window import Window
from latte.mixers.base import Mixer, Preset
from latte.mixers.registry import register
from latte.ops import ComplexState, WindowState, complex_scan
from latte.ops.numbers import bounded_exp, compute_dtype, wide_dtype
from latte.state import State, state
from latte.tokens import Tokens

#: Where the rates of decay start, log-uniform: memories of one to a thousand tokens.
SLOWEST, FASTEST = 1e-3, 1.0
#: log of the fastest rate: what fades faster is gone after one token.
LARGEST_LOG_RATE = 40.0


@state
class SWHState(State):
    spectral: ComplexState
    window: WindowState


@register("swh")
class SWHMixer(Mixer):
    """out = W_o (RMSNorm(c_t) + W_l a_t), a_t softmax attention to the last tokens, c_t = sum_s K_{t-s} . u_s.

    K_n = e^{-alpha n} cos(omega n) per channel and u = W_c x + b, so c_t = Re h_t with h_t = e^{-alpha + i omega}
    h_{t-1} + u_t: one complex number a channel. Source: arXiv 2601.01313. There |alpha| starts N(0, 1), which forgets
    after two tokens: here alpha = e^{log_rate}, log-uniform from 1e-3 to 1. There the window is cut into chunks and a
    token sees one to two of them: here every token sees the last ``window`` ones, with a smaller state.
    """

    @dataclass(frozen=True)
    class Options:
        window: int = 32

    examples = ({"window": 3},)
    presets: ClassVar[Mapping[str, Preset] | None] = {"swh": lambda size: {"mixer_options": {"window": size.window}}}
    marks: ClassVar[Mapping[str, Mark]] = dict.fromkeys(("log_rate", "frequency"), Mark(decay=False, float32=True))

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        D = config.hidden_size
        self.in_proj = TokenLinear(D, D)
        self.log_rate, self.frequency = (nn.Parameter(torch.empty(D)) for _ in range(2))
        self.norm = RMSNorm(D, config.norm_eps)
        self.window = Window(config, self.options.window)
        self.v_proj = Linear(D, config.kv_heads * config.width)
        self.local_proj = Linear(config.num_heads * config.width, D)
        self.o_proj = Linear(D, D, residual=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.uniform_(self.log_rate, math.log(SLOWEST), math.log(FASTEST))
        init.normal_(self.frequency)

    def init_state(self, like_BTD: Tensor) -> SWHState:
        return SWHState(ComplexState.empty(like_BTD, self.config.hidden_size), self.window.init_state(like_BTD))

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        wide = wide_dtype(x_BTD.device)
        u_BTD = self.in_proj(x_BTD).to(compute_dtype(x_BTD))
        u_BTDZ = torch.stack([u_BTD, torch.zeros_like(u_BTD)], dim=-1)
        rate_D = bounded_exp(self.log_rate.to(wide), LARGEST_LOG_RATE)
        h_BTDZ, spectral = complex_scan(u_BTDZ, -rate_D, self.frequency.to(wide), state=state.spectral, tokens=tokens)
        v_BTGV = split_heads(self.v_proj(x_BTD), self.config.kv_heads)
        a_BTHV, _, window = self.window(x_BTD, v_BTGV, state.window, tokens)
        c_BTD = self.norm(h_BTDZ[..., 0].to(x_BTD.dtype))
        assert window is not None
        return self.o_proj(c_BTD + self.local_proj(a_BTHV.flatten(2))), SWHState(spectral, window)

    def flops_per_token(self, context: int) -> int:
        seen = min(context, self.options.window) + 1
        return super().flops_per_token(context) + 4 * seen * self.config.num_heads * self.config.width
