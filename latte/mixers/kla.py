"""Kalman linear attention (2026): values are noisy observations, and the state a posterior with its certainty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, TokenLinear
from latte.layers.marks import Mark
from latte.mixers.base import Mixer, Preset, Size
from latte.mixers.registry import register
from latte.ops import ConvState, KalmanState, causal_conv, kalman
from latte.ops.numbers import compute_dtype
from latte.state import State, state
from latte.tokens import Tokens

#: Where the time steps start, log-uniform.
LEAST_STEP, LARGEST_STEP = 1e-3, 1e-1
#: Where the process variance starts.
VARIANCE = 0.01
#: The least variance of an observation.
LEAST_VARIANCE = 1e-4


@state
class KLAState(State):
    conv: ConvState
    filters: KalmanState


def _preset(size: Size) -> dict[str, Any]:
    """Twice as many layers, since a layer has no MLP."""
    return {"pattern": [["mixer"]], "num_hidden_layers": 2 * size.num_hidden_layers}


@register("kla")
class KLAMixer(Mixer):
    """Filters z[m, n] with prior z_t ~ N(a z_{t-1}, p) observe v_t[m] = k_t[n] z + noise of precision L_t[m].

        l_t = l-_t + L_t k_t^2,  l-_t = l_{t-1} / (a^2 + p l_{t-1});  m_t = (l-_t / l_t) a m_{t-1} + (L_t k_t / l_t) v_t
        out = W_o ((q_t . m_t + c v_t) . silu(g_t))

    (v, g) = W_in x, v through a short convolution and silu; k and q unit vectors of v's; L = 1 / (softplus(.) + 1e-4)
    of low rank. a = e^{-Delta r} and p = s/(2r) (1 - e^{-2 Delta r}), an Ornstein-Uhlenbeck process, constant in time.
    Source: arXiv 2602.10743, its "mamba" form; c starts at -1. The mean is scanned instead of the information vector,
    whose gate exceeds 1. s is a variance, as in the released code; the paper squares it.
    """

    @dataclass(frozen=True)
    class Options:
        state_size: int = 16  # filters of each channel
        expand: int = 2  # channels over hidden_size
        conv_size: int = 4
        noise_rank: int | None = None  # None: hidden_size / 8, rounded up

    examples = ({"state_size": 3, "noise_rank": 2}, {"state_size": 2, "expand": 1, "conv_size": 1})
    presets: ClassVar[Mapping[str, Preset] | None] = {"kla": _preset}
    marks: ClassVar[Mapping[str, Mark]] = dict.fromkeys(
        ("log_step", "log_rate", "log_variance", "skip"), Mark(decay=False, float32=True)
    )

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        options, D = self.options, config.hidden_size
        for name in ("state_size", "expand", "conv_size", "noise_rank"):
            if getattr(options, name) is not None and getattr(options, name) < 1:
                raise ValueError(f"mixer 'kla': {name} is {getattr(options, name)}, expected at least 1")
        self.width, N = options.expand * D, options.state_size
        rank = -(-D // 8) if options.noise_rank is None else options.noise_rank
        self.in_proj = Linear(D, 2 * self.width)
        self.conv_weight = nn.Parameter(torch.empty(self.width, options.conv_size))
        self.conv_bias = nn.Parameter(torch.empty(self.width))
        self.noise_proj = nn.Sequential(Linear(self.width, rank), TokenLinear(rank, self.width))
        self.k_proj, self.q_proj = Linear(self.width, N), Linear(self.width, N)
        self.log_step, self.log_rate, self.log_variance = (nn.Parameter(torch.empty(self.width, N)) for _ in range(3))
        self.skip = nn.Parameter(torch.empty(1))
        self.out_proj = Linear(self.width, D, residual=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.options.conv_size**-0.5
        init.uniform_(self.conv_weight, -bound, bound)
        init.zeros_(self.conv_bias)
        init.uniform_(self.log_step, math.log(LEAST_STEP), math.log(LARGEST_STEP))
        init.zeros_(self.log_rate)
        init.constant_(self.log_variance, math.log(VARIANCE))
        init.constant_(self.skip, -1.0)

    def init_state(self, like_BTD: Tensor) -> KLAState:
        conv = ConvState.empty(like_BTD, self.options.conv_size, self.width)
        return KLAState(conv, KalmanState.empty(like_BTD, self.width, self.options.state_size))

    def process(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """a and p (D, N)."""
        step, rate, variance = (
            x.to(dtype).clamp(-15.0, 5.0).exp() for x in (self.log_step, self.log_rate, self.log_variance)
        )
        # Not below e^-20: a^2 is then still a number of float32.
        fade = (step * rate).clamp(max=20.0)
        return torch.exp(-fade), variance / (2 * rate) * -torch.expm1(-2 * fade)

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        dtype = compute_dtype(x_BTD)
        v, gate = self.in_proj(x_BTD).chunk(2, dim=-1)
        v, conv = causal_conv(v, self.conv_weight, self.conv_bias, state=state.conv, tokens=tokens)
        v = F.silu(v)
        noise = 1 / (F.softplus(self.noise_proj(v).to(dtype)) + LEAST_VARIANCE)
        k, q = (F.normalize(proj(v).to(dtype), dim=-1, eps=1e-6) for proj in (self.k_proj, self.q_proj))
        a, p = self.process(dtype)
        v = v.to(dtype)
        y, filters = kalman(v, noise, k, q, a, p, state=state.filters, tokens=tokens)
        return self.out_proj((y + self.skip * v).to(x_BTD.dtype) * F.silu(gate)), KLAState(conv, filters)

    def flops_per_token(self, context: int) -> int:
        return super().flops_per_token(context) + 16 * self.width * self.options.state_size
