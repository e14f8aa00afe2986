"""LINA (2026): linear attention whose keys and values have learned gates, one for every place in a document."""

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
from latte.layers.rotary import rotary
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import document_attention
from latte.ops.numbers import compute_dtype
from latte.shapes import require_divides
from latte.state import State
from latte.tokens import Tokens

#: Added to features and to gates of keys, so that a query always has weights to divide by.
FLOOR = 1e-6


@register("lina")
class LINAMixer(HeadMixer):
    """y_t = sum_s phi(q_t) . phi(k_s) g_s (f_s v_s) / sum_s phi(q_t) . phi(k_s) g_s, phi(x) = relu(x) + 1e-6.

    g_s > 0 and f_s are gates of keys and values, learned for every head and every place up to ``length``, and start at
    1; a longer document is refused. q and k are turned by rotary encoding before phi. Linear time.

    Source: arXiv 2601.22630, for images. There g may become negative, which leaves the denominator without a bound;
    here it is a softplus. There a constant is added to the denominator, which the positive features make superfluous.
    Its 5 x 5 convolution on the grid of an image is left out.
    """

    @dataclass(frozen=True)
    class Options:
        length: int = 4096  # of the longest document

    linear_in_values = True
    directions = ("bidirectional",)
    examples = (
        {"length": 80, "bidirectional": True},
        {"length": 73, "num_key_value_heads": 1, "bidirectional": True},
    )
    marks: ClassVar[Mapping[str, Mark]] = dict.fromkeys(("key_gate", "value_gate"), Mark(decay=False))

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        if self.options.length < 1:
            raise ValueError(f"mixer 'lina': length is {self.options.length}, expected at least 1")
        require_divides("mixer 'lina'", 2, config.width, "channels in a pair", "head width")
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.width)
        self.k_proj = Linear(config.hidden_size, config.kv_heads * config.width)
        self.key_gate, self.value_gate = (
            nn.Parameter(torch.empty(self.options.length, config.num_heads)) for _ in range(2)
        )
        self.rotary = rotary(config.width, config.rope_theta)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.constant_(self.key_gate, math.log(math.e - 1))  # a softplus of 1
        init.ones_(self.value_gate)

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        if tokens.longest > self.options.length:
            raise ValueError(
                f"mixer 'lina': a document has {tokens.longest} tokens, expected at most length {self.options.length}"
            )
        heads, dtype, place_BT = self.config.num_heads, compute_dtype(x_BTD), tokens.place_BT.clamp(min=0)
        q_BTHK = self._features(split_heads(self.q_proj(x_BTD), heads), tokens)
        k_BTHK = repeat_heads(self._features(split_heads(self.k_proj(x_BTD), self.config.kv_heads), tokens), heads)
        key_gate_NH = F.softplus(self.key_gate.to(dtype)) + FLOOR
        k_BTHK = k_BTHK * key_gate_NH[place_BT][..., None]
        v_BTHV = repeat_heads(v_BTGV, heads).to(dtype) * self.value_gate.to(dtype)[place_BT][..., None]
        # With a 1 behind each value the denominator is one more channel of the sum.
        y_BTHV = document_attention(q_BTHK, k_BTHK, F.pad(v_BTHV, (0, 1), value=1.0), tokens=tokens)
        norm_BTH1 = tokens.fill_padding(y_BTHV[..., -1:], 1.0)
        return (y_BTHV[..., :-1] / norm_BTH1).to(v_BTGV.dtype), None

    def _features(self, x_BTHK: Tensor, tokens: Tokens) -> Tensor:
        return F.relu(self.rotary.turn(x_BTHK, tokens).to(compute_dtype(x_BTHK))) + FLOOR

    def flops_per_token(self, context: int) -> int:
        projections = 2 * sum(module.weight.numel() for module in self.modules() if isinstance(module, Linear))
        return projections + 4 * self.config.num_heads * self.config.width * (self.config.width + 1)
