"""Mamba-2 (Dao and Gu, 2024): a selective state space model with one decay per head."""

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
from latte.layers.linear import Linear, repeat_heads, split_heads
from latte.layers.marks import Mark
from latte.layers.steps import initial_rate_log, initial_step_bias
from latte.mixers.base import Mixer, View
from latte.mixers.registry import register
from latte.ops import ConvState, DecayState, causal_conv, decay_attention
from latte.ops.numbers import compute_dtype
from latte.shapes import require_divides
from latte.state import State, state
from latte.tokens import Tokens

#: Where -A of the heads starts: uniform between the two.
RATES = (1.0, 16.0)


@state
class Mamba2State(State):
    """The last inputs of the convolution, and what the recurrence remembers."""

    conv: ConvState
    memory: State


class GatedRMSNorm(nn.Module):
    """RMSNorm(y . SiLU(z)) of each group of channels by itself, times a learned scale; in float32 or better."""

    def __init__(self, width: int, groups: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.groups, self.eps = groups, eps

    def forward(self, y_BTD: Tensor, z_BTD: Tensor) -> Tensor:
        y, z = (split_heads(x.to(compute_dtype(x)), self.groups) for x in (y_BTD, z_BTD))
        # The norm does not depend on the scale of y, but floats do: y is a product of four projections, whose square
        # overflows for large weights. So y, then the product, are divided by their largest channel, and eps with them.
        largest = y.detach().abs().amax(-1, keepdim=True).clamp(1.0, 1e20)
        gated, floor = y / largest * F.silu(z), math.sqrt(self.eps) / largest
        scale = torch.maximum(gated.detach().abs().amax(-1, keepdim=True), floor)
        gated, floor = gated / scale, floor / scale
        normed = gated * (gated.square().mean(-1, keepdim=True) + floor.square()).rsqrt()
        return normed.flatten(-2).to(z_BTD.dtype) * self.weight


@register("mamba2")
class Mamba2Mixer(Mixer):
    """S_t = e^{Delta_t A} S_{t-1} + B_t (Delta_t x_t)^T,  y_t = C_t^T S_t + D x_t,  o_t = W_o RMSNorm(y_t . SiLU(z_t)).

    x, B and C are projections of the input after a short convolution and SiLU, z is one without;
    Delta_t = softplus(W_dt u_t + b_dt) > 0 and A < 0 are numbers per head. There are expand * hidden_size / head_dim
    heads of x; B and C are shared by the heads of a group. Parameters have the names and shapes of transformers'
    Mamba2Mixer, except the convolution's (conv1d.weight of (D, 1, K) there).
    """

    @dataclass(frozen=True)
    class Options:
        state_size: int = 128  # of B and C: keys and queries of the recurrence
        expand: int = 2  # width of x over hidden_size
        num_groups: int = 1  # of heads that share B and C, and of channels that are normed together
        conv_size: int = 4

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"state_size": 3},
        {"state_size": 5, "expand": 3, "num_groups": 3, "conv_size": 2, "head_dim": 2},
        {"state_size": 4, "expand": 1, "conv_size": 1, "head_dim": 8},
    )
    presets = {"mamba2": lambda size: {"pattern": [["mixer"]], "head_dim": 64}}  # noqa: RUF012
    marks: ClassVar[Mapping[str, Mark]] = dict.fromkeys(("A_log", "D", "dt_bias"), Mark(decay=False, float32=True))

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        options = self.options
        for name in ("state_size", "expand", "num_groups", "conv_size"):
            if getattr(options, name) < 1:
                raise ValueError(f"mixer {self.name!r}: {name} is {getattr(options, name)}, expected at least 1")
        self.inner = options.expand * config.hidden_size
        require_divides(f"mixer {self.name!r}", config.width, self.inner, "head_dim", "expand * hidden_size")
        self.num_heads = self.inner // config.width
        require_divides(f"mixer {self.name!r}", options.num_groups, self.num_heads, "num_groups", "number of heads")
        self.keys = options.num_groups * options.state_size
        convolved = self.inner + 2 * self.keys
        self.in_proj = Linear(config.hidden_size, self.inner + convolved + self.num_heads)
        self.conv_weight = nn.Parameter(torch.empty(convolved, options.conv_size))
        self.conv_bias = nn.Parameter(torch.empty(convolved))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads))
        self.A_log = nn.Parameter(torch.empty(self.num_heads))
        self.D = nn.Parameter(torch.empty(self.num_heads))
        self.norm = GatedRMSNorm(self.inner, options.num_groups, config.norm_eps)
        self.out_proj = Linear(self.inner, config.hidden_size, residual=True)
        self.build_memory()
        self.reset_parameters()

    def build_memory(self) -> None:
        """Parameters of the recurrence beside the above: none here."""

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.options.conv_size)
        init.uniform_(self.conv_weight, -bound, bound)
        init.zeros_(self.conv_bias)
        init.copy_(self.dt_bias, initial_step_bias(self.dt_bias))
        init.copy_(self.A_log, initial_rate_log(self.A_log, *RATES))
        init.ones_(self.D)

    def init_state(self, like_BTD: Tensor) -> Mamba2State:
        conv = ConvState.empty(like_BTD, self.options.conv_size, self.inner + 2 * self.keys)
        return Mamba2State(conv, self.init_memory(like_BTD))

    def init_memory(self, like_BTD: Tensor) -> State:
        """What the recurrence remembers before any token."""
        return DecayState.empty(like_BTD, self.num_heads, self.options.state_size, self.config.width)

    def recur(
        self, u_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, memory: Any, tokens: Tokens
    ) -> tuple[Tensor, State]:
        """The recurrence between convolution and norm; ``u`` is the layer's input."""
        return decay_attention(q, k, v, log_decay, state=memory, tokens=tokens)

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        z, xBC, dt = self.in_proj(x_BTD).split([self.inner, self.inner + 2 * self.keys, self.num_heads], dim=-1)
        xBC, conv = causal_conv(xBC, self.conv_weight, self.conv_bias, state=state.conv, tokens=tokens)
        xBC = F.silu(xBC.to(compute_dtype(xBC)))
        x, B, C = xBC.split([self.inner, self.keys, self.keys], dim=-1)
        x_BTHV = split_heads(x, self.num_heads)
        k, q = (repeat_heads(split_heads(y, self.options.num_groups), self.num_heads) for y in (B, C))
        step_BTH, log_decay_BTH = self._steps(dt, x.dtype)
        y_BTHV, memory = self.recur(x_BTD, q, k, step_BTH[..., None] * x_BTHV, log_decay_BTH, state.memory, tokens)
        y_BTHV = y_BTHV + self.D.to(x.dtype)[:, None] * x_BTHV
        return self.out_proj(self.norm(y_BTHV.flatten(2), z)), Mamba2State(conv, memory)

    def _steps(self, dt_BTH: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Delta and Delta A."""
        step_BTH = F.softplus(dt_BTH.to(dtype) + self.dt_bias.to(dtype))
        return step_BTH, -self.A_log.to(dtype).exp() * step_BTH

    def look(self, x_BTD: Tensor, tokens: Tokens | None = None) -> dict[str, View]:
        """``gates``: what a token leaves of the state before it, e^{Delta A}."""
        dt = self.in_proj(x_BTD)[..., -self.num_heads :]
        _, log_decay_BTH = self._steps(dt, compute_dtype(x_BTD))
        return {"gates": View("channels", log_decay_BTH.exp()[..., None], False)}
