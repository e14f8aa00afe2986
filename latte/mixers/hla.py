"""Higher-order linear attention (Zhang et al., 2025): linear attention whose keys or values are linear attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, TokenLinear, head_norm, split_heads
from latte.layers.rotary import rotary
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import DecayState, decay_attention
from latte.shapes import require_divides
from latte.state import State, state
from latte.tokens import Tokens


@state
class HLAState(State):
    """What each stage of the cascade remembers, in the order they are computed."""

    stages: tuple[DecayState, ...]


class HLAMixer(HeadMixer):
    """The cascades below, of LA(q, k, v; g)_t = sum_{s<=t} e^{g_{s+1} + ... + g_t} (q_t . k_s) v_s.

    Departures from the source, arXiv 2510.27258. With decay its scan operators are not associative and differ from its
    serial rule: here every stage of the cascade has a gate g = logsigmoid(x W + b) / tau of its own, per head. Its
    third order deletes the main term: here it is the exact one. Queries and keys are unit vectors, since weights are
    of degree 4 or more in them; heads are normed. The source gives no sizes and no experiments.
    """

    @dataclass(frozen=True)
    class Options:
        gated: bool = True
        gate_temperature: float = 16.0  # tau
        rope: bool = True

    linear_in_values = True
    #: Whether keys and values are computed by a stage of their own, before the last.
    composed_keys: ClassVar[bool]
    composed_values: ClassVar[bool]

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        if self.options.gate_temperature <= 0:
            got = f"gate_temperature is {self.options.gate_temperature}"
            raise ValueError(f"mixer {self.name!r}: {got}, expected a positive number")
        if self.options.rope:
            require_divides(f"mixer {self.name!r}", 2, config.width, "channels in a pair", "head width")
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.width)
        self.k_proj = Linear(config.hidden_size, config.num_heads * config.width)
        self.stages = 1 + self.composed_keys + self.composed_values
        self.gate_proj = TokenLinear(config.hidden_size, self.stages * config.num_heads) if self.options.gated else None
        self.rotary = rotary(config.width, config.rope_theta) if self.options.rope else None

    def value_shape(self) -> tuple[int, int]:
        return self.config.num_heads, self.config.width

    def init_state(self, like_BTD: Tensor) -> HLAState:
        H, K = self.config.num_heads, self.config.width
        return HLAState(tuple(DecayState.empty(like_BTD, H, K, K) for _ in range(self.stages)))

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.o_proj(head_norm(y_BTHV, self.config.norm_eps).flatten(2))

    def gates(self, x_BTD: Tensor) -> list[Tensor | None]:
        """g (B, T, H) of every stage."""
        if self.gate_proj is None:
            return [None] * self.stages
        gates = F.logsigmoid(self.gate_proj(x_BTD).to(x_BTD.dtype)) / self.options.gate_temperature
        return list(gates.chunk(self.stages, dim=-1))

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        q, k = (
            F.normalize(split_heads(proj(x_BTD), self.config.num_heads), dim=-1, eps=1e-6)
            for proj in (self.q_proj, self.k_proj)
        )
        if self.rotary is not None:
            q, k = (self.rotary.turn(x, tokens) for x in (q, k))
        gates = iter(self.gates(x_BTD))
        before = iter((None,) * self.stages if state is None else state.stages)
        after: list[DecayState] = []

        def stage(keys: Tensor, values: Tensor) -> Tensor:
            y, end = decay_attention(q, keys, values, next(gates), state=next(before), tokens=tokens)
            after.append(end)
            return y

        keys = stage(k, k) if self.composed_keys else k
        values = stage(k, v_BTGV) if self.composed_values else v_BTGV
        return stage(keys, values), HLAState(tuple(after))


@register("hla2")
class HLA2Mixer(HLAMixer):
    """y = LA(q, LA(q, k, k), v): without gates o_t = sum_{i<=j<=t} (q_t . k_i)(k_i . q_j) v_j, second order."""

    composed_keys, composed_values = True, False
    examples = ({}, {"gated": False, "rope": False}, {"gate_temperature": 1.0})


@register("ahla")
class AHLAMixer(HLAMixer):
    """y = LA(q, k, LA(q, k, v)): without gates o_t = sum_{j<=i<=t} (q_t . k_i)(q_i . k_j) v_j, asymmetric."""

    composed_keys, composed_values = False, True
    examples = ({"gate_temperature": 1.0}, {"gated": False, "rope": False})


@register("hla3")
class HLA3Mixer(HLAMixer):
    """y = LA(q, LA(q, k, k), LA(q, k, v)): without gates ((W W^T . L) W) V, W = L . (Q K^T), third order."""

    composed_keys, composed_values = True, True
    examples = ({"gate_temperature": 1.0}, {"gated": False, "rope": False})
