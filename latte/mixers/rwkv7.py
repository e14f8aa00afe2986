"""RWKV-7 "Goose" (Peng et al., 2025): a delta rule with a decay and a learning rate per channel.

Every projection looks one token back through a blend x_t + (x_{t-1} - x_t) . mu of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, LowRank, split_heads, unit_length
from latte.layers.marks import Mark
from latte.mixers.base import Mixer, Preset
from latte.mixers.registry import register
from latte.mixers.rwkv4 import ramp, shift
from latte.mixers.rwkv6 import ScaledHeadNorm
from latte.ops import ConvState, DeltaState, delta_attention
from latte.ops.numbers import compute_dtype
from latte.shapes import require_divides
from latte.state import State, state
from latte.tokens import Tokens

#: What is projected from a blend, and how fast its mu falls along the channels at the start.
BLENDS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}
#: The name under which the first layer's values are handed on.
VALUES = "rwkv7 values"


@state
class RWKV7State(State):
    shift: ConvState
    memory: DeltaState


@register("rwkv7")
class RWKV7Mixer(Mixer):
    """S_t = diag(w_t) S_{t-1} - (eta_t . kk_t)(kk_t^T S_{t-1}) + k~_t v_t^T,  y_t = S_t^T r_t.

    kk = k . xi at length 1, eta = sigmoid(a_0 + low rank), k~ = k . (1 + (eta - 1) . k_a), and the output is W_o
    ((norm(y) + (sum r . k~ . r_k) v) . g). w = e^{-e^{-1/2} sigmoid(w_0 + low rank)}, g low rank. Values of all layers
    but the first move towards those of the first by sigmoid(v_0 + low rank), which later layers are handed beside the
    residual stream.
    """

    @dataclass(frozen=True)
    class Options:
        decay_rank: int = 64
        rate_rank: int = 64
        value_rank: int = 32
        gate_rank: int = 128

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"decay_rank": 2, "rate_rank": 3, "value_rank": 2, "gate_rank": 4},
        {"head_dim": 8},
    )
    presets: ClassVar[Mapping[str, Preset] | None] = {
        "rwkv7": lambda size: {
            "pattern": [["mixer", "rwkv7-channel"]],
            "norm": "layer",
            "norm_eps": 1e-5,
            "embedding_norm": True,
            "num_attention_heads": size.hidden_size // 64,
        }
    }
    marks: ClassVar[Mapping[str, Mark]] = {
        "w_0": Mark(decay=False, float32=True),
        **dict.fromkeys(("a_0", "v_0", "k_k", "k_a", "r_k"), Mark(decay=False)),
    }

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        D, options = config.hidden_size, self.options
        require_divides(f"mixer {self.name!r}", config.width, D, "head_dim", "hidden_size")
        self.num_heads = D // config.width
        for name in ("decay_rank", "rate_rank", "value_rank", "gate_rank"):
            if getattr(options, name) < 1:
                raise ValueError(f"mixer {self.name!r}: {name} is {getattr(options, name)}, expected at least 1")
        self.mu = nn.ParameterDict({name: torch.empty(D) for name in BLENDS})
        self.w_0, self.a_0, self.k_k, self.k_a, self.r_k = (nn.Parameter(torch.empty(D)) for _ in range(5))
        self.decay_proj = LowRank(D, options.decay_rank, D, torch.tanh)
        self.rate_proj = LowRank(D, options.rate_rank, D)
        self.gate_proj = LowRank(D, options.gate_rank, D, torch.sigmoid)
        if config.layer_index > 0:
            self.v_0 = nn.Parameter(torch.empty(D))
            self.value_proj = LowRank(D, options.value_rank, D)
        self.r_proj, self.k_proj, self.v_proj = (Linear(D, D) for _ in range(3))
        self.norm = ScaledHeadNorm(D, config.norm_eps)
        self.o_proj = Linear(D, D, residual=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        config, D = self.config, self.config.hidden_size
        depth = config.layer_index / max(config.num_layers - 1, 1)  # 0 in the first layer, 1 in the last
        for name, power in BLENDS.items():
            init.copy_(self.mu[name], 1 - ramp(config, self.mu[name], power))
        along = torch.arange(D, dtype=self.w_0.dtype, device=self.w_0.device) / max(D - 1, 1)
        init.copy_(self.w_0, -6.5 + 5 * along ** (0.85 + math.sqrt(depth)))
        for parameter, value in ((self.a_0, 0.0), (self.k_k, 0.71), (self.k_a, 1.02), (self.r_k, -0.04)):
            init.constant_(parameter, value)
        low_rank = [self.decay_proj, self.rate_proj, self.gate_proj]
        if config.layer_index > 0:
            init.ones_(self.v_0)
            low_rank.append(self.value_proj)
        for pair in low_rank:
            init.zeros_(pair.down.weight)
            init.orthogonal_(pair.up.weight, gain=0.1)
        for projection, size in ((self.r_proj, 0.5), (self.k_proj, 0.05), (self.v_proj, 0.5)):
            init.uniform_(projection.weight, -size / math.sqrt(D), size / math.sqrt(D))
        init.zeros_(self.o_proj.weight)

    def init_state(self, like_BTD: Tensor) -> RWKV7State:
        width = self.config.width
        memory = DeltaState.empty(like_BTD, self.num_heads, width, width)
        return RWKV7State(ConvState.empty(like_BTD, 2, self.config.hidden_size), memory)

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        return self.mix_carrying(x_BTD, state, tokens, {})

    def mix_carrying(
        self, x_BTD: Tensor, state: Any, tokens: Tokens, carried: dict[str, Tensor]
    ) -> tuple[Tensor, State | None]:
        wide = compute_dtype(x_BTD)
        before_BTD, last = shift(x_BTD, state.shift, tokens)
        back_BTD = before_BTD - x_BTD
        x_r, x_w, x_k, x_v, x_a, x_g = (x_BTD + back_BTD * self.mu[name] for name in BLENDS)
        r, k, v = (project(x).to(wide) for project, x in ((self.r_proj, x_r), (self.k_proj, x_k), (self.v_proj, x_v)))
        first = carried.setdefault(VALUES, v)
        if self.config.layer_index > 0:
            v = torch.lerp(v, first, torch.sigmoid(self.v_0.to(wide) + self.value_proj(x_v).to(wide)))
        rate = torch.sigmoid(self.a_0.to(wide) + self.rate_proj(x_a).to(wide))
        log_decay = -math.exp(-0.5) * torch.sigmoid(self.w_0.to(wide) + self.decay_proj(x_w).to(wide))
        erased = unit_length(split_heads(k * self.k_k.to(wide), self.num_heads), 1e-12)
        k = k * (1 + (rate - 1) * self.k_a.to(wide))
        r, k, v, bonus, rate, log_decay = (
            split_heads(y, self.num_heads) for y in (r, k, v, r * k * self.r_k.to(wide), rate, log_decay)
        )
        y_BTHV, memory = delta_attention(r, k, v, -erased, rate * erased, log_decay, state=state.memory, tokens=tokens)
        y_BTD = self.norm(y_BTHV) + (bonus.sum(-1, keepdim=True) * v).flatten(2)
        y_BTD = self.o_proj(y_BTD.to(x_BTD.dtype) * self.gate_proj(x_g))
        return tokens.zero_padding(y_BTD), RWKV7State(last, memory)


@register("rwkv7-channel")
class RWKV7ChannelMixer(Mixer):
    """y_t = W_v relu(W_k (x_t + (x_{t-1} - x_t) . mu))^2."""

    presets: ClassVar[Mapping[str, Preset] | None] = {}  # half of a layer: the other half has one
    marks: ClassVar[Mapping[str, Mark]] = {"mu": Mark(decay=False)}

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        self.mu = nn.Parameter(torch.empty(config.hidden_size))
        self.k_proj = Linear(config.hidden_size, config.inner_width)
        self.v_proj = Linear(config.inner_width, config.hidden_size, residual=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 0.5 / math.sqrt(self.config.hidden_size)
        init.copy_(self.mu, 1 - ramp(self.config, self.mu, 4.0))
        init.uniform_(self.k_proj.weight, -bound, bound)
        init.zeros_(self.v_proj.weight)

    def init_state(self, like_BTD: Tensor) -> ConvState:
        return ConvState.empty(like_BTD, 2, self.config.hidden_size)

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        before_BTD, last = shift(x_BTD, state, tokens)
        k = self.k_proj(torch.lerp(x_BTD, before_BTD, self.mu))
        return tokens.zero_padding(self.v_proj(torch.relu(k).square())), last
