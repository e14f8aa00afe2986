"""H3 (Fu et al., 2023): two state-space models with products between them, a shift and a diagonal one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.config import MixerConfig
from latte.layers.diagonal import SLOW, SLOWEST, zero_order_hold
from latte.layers.linear import TokenLinear
from latte.layers.marks import Mark
from latte.mixers.base import Mixer
from latte.mixers.registry import register
from latte.ops import ComplexState, ConvState, causal_conv, state_space
from latte.ops.numbers import compute_dtype
from latte.state import State, state
from latte.tokens import Tokens

#: Where the time steps start, log-uniform.
LEAST_STEP, LARGEST_STEP = 1e-3, 1e-1


@state
class H3State(State):
    shift: ConvState
    diagonal: ComplexState


@register("h3")
class H3Mixer(Mixer):
    """out = W_o (q . (S(k') . v))_t, k' = conv(k) + d_k . k, with S a diagonal state-space model of every channel:

        h_t = a h_{t-1} + (a - 1) / A . z_t    y_t = 2 Re(C . h_t) + d . z_t    z = k' . v,  a = e^{Delta A}

    q, k and v are projections with biases; the convolution is the shift model, a learned filter of ``shift_size`` taps.
    A starts at -1/2 + i pi n (S4D-Lin). Source: arXiv 2212.14052 with heads of width 1. There the model is discretised
    by the bilinear rule and computed by FFT; here by zero-order hold (an option there), by a native scan or by FFTs
    through which no token meets a later one (``latte.ops.state_space``), and Re A = -1e-4 - e^{log_rate}, so that it
    never grows.
    """

    @dataclass(frozen=True)
    class Options:
        state_size: int = 64  # of each channel, of which half are computed: they come in conjugate pairs
        shift_size: int = 4

    examples = ({"state_size": 4}, {"state_size": 2, "shift_size": 1})
    published = {"h3": (21.0, 125)}  # noqa: RUF012
    marks: ClassVar[Mapping[str, Mark]] = {
        **dict.fromkeys(("log_rate", "frequency", "log_step"), SLOW),
        **dict.fromkeys(("skip", "shift_skip"), Mark(decay=False)),
    }

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        D, options = config.hidden_size, self.options
        if options.state_size < 2 or options.state_size % 2:
            raise ValueError(f"mixer 'h3': state_size is {options.state_size}, expected an even number, at least 2")
        if options.shift_size < 1:
            raise ValueError(f"mixer 'h3': shift_size is {options.shift_size}, expected at least 1")
        self.q_proj, self.k_proj, self.v_proj = (TokenLinear(D, D) for _ in range(3))
        self.shift_weight = nn.Parameter(torch.empty(D, options.shift_size))
        self.shift_skip, self.skip, self.log_step = (nn.Parameter(torch.empty(D)) for _ in range(3))
        self.log_rate, self.frequency = (nn.Parameter(torch.empty(D, options.state_size // 2)) for _ in range(2))
        self.out_weight = nn.Parameter(torch.empty(D, options.state_size // 2, 2))  # C
        self.o_proj = TokenLinear(D, D)
        self.o_proj.residual = True  # type: ignore[assignment]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.uniform_(self.log_step, math.log(LEAST_STEP), math.log(LARGEST_STEP))
        init.constant_(self.log_rate, math.log(0.5 - SLOWEST))
        index = torch.arange(self.options.state_size // 2, dtype=self.frequency.dtype, device=self.frequency.device)
        init.copy_(self.frequency, (math.pi * index).expand_as(self.frequency))
        init.normal_(self.out_weight, std=0.5**0.5)
        bound = self.options.shift_size**-0.5
        init.uniform_(self.shift_weight, -bound, bound)
        init.normal_(self.shift_skip)
        init.normal_(self.skip)

    def init_state(self, like_BTD: Tensor) -> H3State:
        D = self.config.hidden_size
        conv = ConvState.empty(like_BTD, self.options.shift_size, D)
        return H3State(conv, ComplexState.empty(like_BTD, D * self.options.state_size // 2))

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        dtype = compute_dtype(x_BTD)
        q, k, v = (proj(x_BTD).to(x_BTD.dtype) for proj in (self.q_proj, self.k_proj, self.v_proj))
        shifted, shift = causal_conv(k, self.shift_weight, state=state.shift, tokens=tokens)
        z_BTD = ((shifted + self.shift_skip * k) * v).to(dtype)
        model = zero_order_hold(self.log_rate, self.frequency, self.log_step, self.out_weight)
        read_BTD, diagonal = state_space(z_BTD, *model, state=state.diagonal, tokens=tokens)
        y_BTD = (read_BTD + self.skip.to(dtype) * z_BTD).to(x_BTD.dtype)
        out_BTD = self.o_proj(q * y_BTD).to(x_BTD.dtype)
        return tokens.zero_padding(out_BTD), H3State(shift, diagonal)

    def flops_per_token(self, context: int) -> int:
        return super().flops_per_token(context) + 8 * self.config.hidden_size * self.options.state_size
