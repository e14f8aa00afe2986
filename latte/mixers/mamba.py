"""Mamba (Gu and Dao, 2023): a state-space model whose time step and projections depend on the token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear
from latte.layers.marks import Mark
from latte.mixers.base import Mixer, Preset, Size
from latte.mixers.registry import register
from latte.ops import ConvState, SelectiveState, causal_conv, selective_scan
from latte.ops.numbers import bounded_exp, compute_dtype
from latte.state import State, state
from latte.tokens import Tokens

#: Where the time steps start, before the token has its say.
LEAST_STEP, LARGEST_STEP = 1e-3, 1e-1
#: log of the fastest rate -A: what fades faster is gone after one token, and its products stay finite.
LARGEST_LOG_RATE = 40.0


@state
class MambaState(State):
    conv: ConvState
    scan: SelectiveState


def _preset(size: Size) -> dict[str, Any]:
    """Twice as many layers, since a layer has no MLP."""
    return {"pattern": [["mixer"]], "num_hidden_layers": 2 * size.num_hidden_layers}


@register("mamba")
class MambaMixer(Mixer):
    """h_t = e^{Delta_t A} h_{t-1} + Delta_t B_t x_t, y_t = C_t . h_t + D x_t, out = W_o (y . silu(z)).

    (u, z) = W_in of the input; x = silu(conv(u)); (r, B, C) = W_x x; Delta = softplus(W_dt r + b_dt); A = -e^{A_log}.
    Every channel of x has a state of its own, diagonal, and B and C are shared by all channels.
    """

    @dataclass(frozen=True)
    class Options:
        state_size: int = 16  # of each channel
        expand: int = 2  # channels over hidden_size
        conv_size: int = 4
        dt_rank: int | None = None  # of the time steps' projection; None: hidden_size / 16, rounded up

    examples = ({"state_size": 4}, {"state_size": 3, "expand": 1, "conv_size": 2, "dt_rank": 2})
    presets: ClassVar[Mapping[str, Preset] | None] = {"mamba": _preset}
    published = {"mamba": (17.70, 149)}  # noqa: RUF012
    marks: ClassVar[Mapping[str, Mark]] = {
        "A_log": Mark(decay=False, float32=True),
        "D": Mark(decay=False, float32=True),
        "dt_bias": Mark(decay=False, float32=True),
    }

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        options = self.options
        for name in ("state_size", "expand", "conv_size", "dt_rank"):
            if getattr(options, name) is not None and getattr(options, name) < 1:
                raise ValueError(f"mixer 'mamba': {name} is {getattr(options, name)}, expected at least 1")
        self.width = options.expand * config.hidden_size
        self.rank = -(-config.hidden_size // 16) if options.dt_rank is None else options.dt_rank
        self.in_proj = Linear(config.hidden_size, 2 * self.width)
        self.conv_weight = nn.Parameter(torch.empty(self.width, options.conv_size))
        self.conv_bias = nn.Parameter(torch.empty(self.width))
        self.x_proj = Linear(self.width, self.rank + 2 * options.state_size)
        self.dt_proj = Linear(self.rank, self.width)
        self.dt_bias = nn.Parameter(torch.empty(self.width))
        self.A_log = nn.Parameter(torch.empty(self.width, options.state_size))
        self.D = nn.Parameter(torch.empty(self.width))
        self.out_proj = Linear(self.width, config.hidden_size, residual=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.options.conv_size**-0.5
        init.uniform_(self.conv_weight, -bound, bound)
        init.zeros_(self.conv_bias)
        init.uniform_(self.dt_proj.weight, -(self.rank**-0.5), self.rank**-0.5)
        # Time steps log-uniform, then b_dt = softplus^-1 of them.
        log_step = torch.empty_like(self.dt_bias, requires_grad=False)
        step = log_step.uniform_(math.log(LEAST_STEP), math.log(LARGEST_STEP)).exp()
        init.copy_(self.dt_bias, step + (-torch.expm1(-step)).log())
        rates = torch.arange(1, self.options.state_size + 1, dtype=self.A_log.dtype, device=self.A_log.device)
        init.copy_(self.A_log, rates.log().expand_as(self.A_log))
        init.ones_(self.D)

    def init_state(self, like_BTD: Tensor) -> MambaState:
        conv = ConvState.empty(like_BTD, self.options.conv_size, self.width)
        return MambaState(conv, SelectiveState.empty(like_BTD, self.width, self.options.state_size))

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        wide, size = compute_dtype(x_BTD), self.options.state_size
        u, z = self.in_proj(x_BTD).chunk(2, dim=-1)
        u, conv = causal_conv(u, self.conv_weight, self.conv_bias, state=state.conv, tokens=tokens)
        u = F.silu(u)
        r, B, C = self.x_proj(u).split([self.rank, size, size], dim=-1)
        delta = F.softplus(self.dt_proj(r).to(wide) + self.dt_bias)
        A = -bounded_exp(self.A_log, LARGEST_LOG_RATE)
        u = u.to(wide)
        y, scan = selective_scan(u, delta, A, B.to(wide), C.to(wide), state=state.scan, tokens=tokens)
        return self.out_proj((y + self.D * u).to(x_BTD.dtype) * F.silu(z)), MambaState(conv, scan)
