"""RWKV-4 (Peng et al., 2023): time mixing by a fading mean per channel, and channel mixing in the place of the MLP.

Both look one token back: x~ = mu . x_t + (1 - mu) . x_{t-1}, with a mu of its own for every projection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear
from latte.layers.marks import Mark
from latte.mixers.base import Mixer, Preset
from latte.mixers.registry import register
from latte.ops import ConvState, WKVState, causal_conv, wkv
from latte.ops.numbers import compute_dtype
from latte.state import State, state
from latte.tokens import Tokens


@state
class RWKV4State(State):
    shift: ConvState
    wkv: WKVState


def shift(x_BTD: Tensor, state: ConvState, tokens: Tokens) -> tuple[Tensor, ConvState]:
    """The token before each, of the same document, zeros before the first; and the last token as a state."""
    taps_D2 = x_BTD.new_tensor([1.0, 0.0]).expand(x_BTD.shape[2], 2)
    return causal_conv(x_BTD, taps_D2, state=state, tokens=tokens)


def ramp(config: MixerConfig, like_D: Tensor, power: float = 1.0) -> Tensor:
    """Where the mus start: (i / D)^{power (1 - l/L)}, later layers with more of the present token."""
    channel_D = torch.arange(config.hidden_size, dtype=like_D.dtype, device=like_D.device) / config.hidden_size
    return channel_D ** (power * (1 - config.layer_index / config.num_layers))


@register("rwkv4")
class RWKV4Mixer(Mixer):
    """y_t = W_o (sigmoid(r_t) . wkv_t), where wkv_t is the mean of v_s over s <= t, per channel, under fading weights.

    They are e^{k_s - (t-1-s) w} for s < t and e^{u + k_t} for t itself; w = e^{time_decay}, u = time_first; k, v and r
    are projections of the shifted input.
    """

    presets: ClassVar[Mapping[str, Preset] | None] = {
        "rwkv4": lambda size: {
            "pattern": [["mixer", "rwkv4-channel"]],
            "norm": "layer",
            "norm_eps": 1e-5,
            "embedding_norm": True,
        }
    }
    published = {"rwkv4": (18.97, 153)}  # noqa: RUF012
    marks: ClassVar[Mapping[str, Mark]] = {
        "time_decay": Mark(decay=False, float32=True),
        "time_first": Mark(decay=False, float32=True),
        **dict.fromkeys(("mu_k", "mu_v", "mu_r"), Mark(decay=False)),
    }

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        D = config.hidden_size
        self.mu_k, self.mu_v, self.mu_r = (nn.Parameter(torch.empty(D)) for _ in range(3))
        self.time_decay, self.time_first = (nn.Parameter(torch.empty(D)) for _ in range(2))
        self.k_proj, self.v_proj, self.r_proj = (Linear(D, D) for _ in range(3))
        self.o_proj = Linear(D, D, residual=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        config, D = self.config, self.config.hidden_size
        depth = config.layer_index / max(config.num_layers - 1, 1)  # 0 in the first layer, 1 in the last
        init.copy_(self.mu_k, ramp(config, self.mu_k))
        init.copy_(self.mu_v, ramp(config, self.mu_v) + 0.3 * depth)
        init.copy_(self.mu_r, ramp(config, self.mu_r, 0.5))
        channel_D = torch.arange(D, dtype=self.time_decay.dtype, device=self.time_decay.device)
        init.copy_(self.time_decay, -5 + 8 * (channel_D / max(D - 1, 1)) ** (0.7 + 1.3 * depth))
        init.copy_(self.time_first, math.log(0.3) + 0.5 * ((channel_D + 1) % 3 - 1))

    def init_state(self, like_BTD: Tensor) -> RWKV4State:
        D = self.config.hidden_size
        return RWKV4State(ConvState.empty(like_BTD, 2, D), WKVState.empty(like_BTD, D))

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        wide = compute_dtype(x_BTD)
        before_BTD, last = shift(x_BTD, state.shift, tokens)
        projections = ((self.k_proj, self.mu_k), (self.v_proj, self.mu_v), (self.r_proj, self.mu_r))
        k, v, r = (project(torch.lerp(before_BTD, x_BTD, mu)) for project, mu in projections)
        mean_BTD, after = wkv(
            k.to(wide), v.to(wide), self.time_decay.exp(), self.time_first, state=state.wkv, tokens=tokens
        )
        return self.o_proj(torch.sigmoid(r) * mean_BTD.to(x_BTD.dtype)), RWKV4State(last, after)


@register("rwkv4-channel")
class RWKV4ChannelMixer(Mixer):
    """y_t = sigmoid(r_t) . W_v relu(k_t)^2, with k and r projections of the shifted input."""

    presets: ClassVar[Mapping[str, Preset] | None] = {}  # half of a layer: the other half has one

    marks: ClassVar[Mapping[str, Mark]] = dict.fromkeys(("mu_k", "mu_r"), Mark(decay=False))

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        D = config.hidden_size
        self.mu_k, self.mu_r = (nn.Parameter(torch.empty(D)) for _ in range(2))
        self.k_proj = Linear(D, config.inner_width)
        self.r_proj = Linear(D, D)
        self.v_proj = Linear(config.inner_width, D, residual=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.copy_(self.mu_k, ramp(self.config, self.mu_k))
        init.copy_(self.mu_r, ramp(self.config, self.mu_r))

    def init_state(self, like_BTD: Tensor) -> ConvState:
        return ConvState.empty(like_BTD, 2, self.config.hidden_size)

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        before_BTD, last = shift(x_BTD, state, tokens)
        k, r = (
            project(torch.lerp(before_BTD, x_BTD, mu))
            for project, mu in ((self.k_proj, self.mu_k), (self.r_proj, self.mu_r))
        )
        return tokens.zero_padding(torch.sigmoid(r) * self.v_proj(torch.relu(k).square())), last
