"""DeltaNet (Schlag et al., 2021; Yang et al., 2024): a matrix state that learns online to map keys to values."""

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
from latte.layers.linear import Linear, RMSNorm, repeat_heads, split_heads, unit_length
from latte.mixers.base import View
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import ConvState, DeltaState, causal_conv, delta_attention
from latte.ops.numbers import compute_dtype
from latte.shapes import require_divides
from latte.state import State, state
from latte.tokens import Tokens


@state
class DeltaNetState(State):
    """The last inputs of the convolution, and what the recurrence remembers."""

    conv: ConvState
    memory: State


@register("deltanet")
class DeltaNetMixer(HeadMixer):
    """S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T,  y_t = S_t^T q_t / sqrt(K),  o_t = W_o RMSNorm(y_t).

    A step of size beta_t = sigmoid(W_b x_t) down the gradient of |S^T k_t - v_t|^2 / 2. q, k and v are projections
    after a short convolution and SiLU; q and k have length 1. With ``negative_eigenvalues`` beta is twice as large,
    which lets a token turn round what the state says of its key.
    """

    @dataclass(frozen=True)
    class Options:
        key_fraction: float = 1.0  # key width of all heads over hidden_size
        value_fraction: float = 1.0
        key_heads: int | None = None  # shared by groups of heads; None: as many as heads
        conv_size: int = 4
        negative_eigenvalues: bool = False

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {},
        {"key_fraction": 1.5, "value_fraction": 0.5, "key_heads": 1, "conv_size": 2, "negative_eigenvalues": True},
    )

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        where, options = f"mixer {self.name!r}", self.options
        if options.conv_size < 1:
            raise ValueError(f"{where}: conv_size is {options.conv_size}, expected at least 1")
        self.key_heads = config.num_heads if options.key_heads is None else options.key_heads
        require_divides(where, self.key_heads, config.num_heads, "key_heads", "num_heads")
        self.key_width = self._width("key_fraction")
        keys, values = self.key_heads * self.key_width, config.num_heads * self.value_width
        self.q_proj, self.k_proj = Linear(config.hidden_size, keys), Linear(config.hidden_size, keys)
        self.b_proj = Linear(config.hidden_size, config.num_heads)
        self.conv_weight = nn.Parameter(torch.empty(2 * keys + values, options.conv_size))
        self.norm = RMSNorm(self.value_width, config.norm_eps)
        self.build_gates()
        self.reset_parameters()

    def build_gates(self) -> None:
        """Parameters of decay and output gate: none here."""

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.options.conv_size)
        init.uniform_(self.conv_weight, -bound, bound)

    def value_shape(self) -> tuple[int, int]:
        return self.config.num_heads, self._width("value_fraction")

    def _width(self, fraction: str) -> int:
        """Per head."""
        heads, width = self.config.num_heads, int(self.config.hidden_size * getattr(self.options, fraction))
        require_divides(f"mixer {self.name!r}", heads, width, "num_heads", f"{fraction} * hidden_size")
        return width // heads

    def init_state(self, like_BTD: Tensor) -> DeltaNetState:
        return DeltaNetState(
            ConvState.empty(like_BTD, self.options.conv_size, self.conv_weight.shape[0]), self.init_memory(like_BTD)
        )

    def init_memory(self, like_BTD: Tensor) -> State:
        """What the recurrence remembers before any token."""
        return DeltaState.empty(like_BTD, self.config.num_heads, self.key_width, self.value_width)

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        conv, memory = (None, None) if state is None else (state.conv, state.memory)
        mixed = torch.cat([self.q_proj(x_BTD), self.k_proj(x_BTD), v_BTGV.flatten(2)], dim=-1)
        mixed, conv = causal_conv(mixed, self.conv_weight, state=conv, tokens=tokens)
        mixed = F.silu(mixed.to(compute_dtype(mixed)))
        keys = self.key_heads * self.key_width
        q, k, v = mixed.split([keys, keys, mixed.shape[-1] - 2 * keys], dim=-1)
        q, k = (repeat_heads(unit_length(split_heads(y, self.key_heads)), self.config.num_heads) for y in (q, k))
        scaled = q * self.key_width**-0.5
        y_BTHV, memory = self.recur(x_BTD, scaled, k, split_heads(v, self.config.num_heads), memory, tokens)
        return y_BTHV.to(x_BTD.dtype), DeltaNetState(conv, memory)

    def recur(
        self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, memory: Any, tokens: Tokens
    ) -> tuple[Tensor, State]:
        """The recurrence between convolution and norm: a decay comes before what the key reads."""
        log_decay, erased = self.log_decay(x_BTD), k
        if log_decay is not None:
            erased = k * (log_decay if log_decay.dim() == 4 else log_decay[..., None]).exp()
        written = k * self.rates(x_BTD)[..., None]
        return delta_attention(q, written, v, erased, None, log_decay, state=memory, tokens=tokens)

    def rates(self, x_BTD: Tensor) -> Tensor:
        """beta (B, T, H)."""
        rate_BTH = torch.sigmoid(self.b_proj(x_BTD).to(compute_dtype(x_BTD)))
        return 2 * rate_BTH if self.options.negative_eigenvalues else rate_BTH

    def log_decay(self, x_BTD: Tensor) -> Tensor | None:
        """(B, T, H) or (B, T, H, K), at most 0; None where nothing fades by itself."""
        return None

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.o_proj(self.norm(y_BTHV).flatten(2))

    def look(self, x_BTD: Tensor, tokens: Tokens | None = None) -> dict[str, View]:
        """``rates``: how much of the prediction's error a token corrects; ``gates``: what decay leaves of the state."""
        views = {"rates": View("channels", self.rates(x_BTD)[..., None], False)}
        log_decay = self.log_decay(x_BTD)
        if log_decay is not None:
            gates = (log_decay if log_decay.dim() == 4 else log_decay[..., None]).exp()
            views["gates"] = View("channels", gates, False)
        return views
