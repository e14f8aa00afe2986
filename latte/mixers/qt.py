"""QT attention (QT-ViT, 2024): linear attention whose features make the exponential to second order, or nearly so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, repeat_heads, split_heads
from latte.layers.marks import Mark
from latte.layers.taylor import second_order, second_order_width
from latte.mixers.base import Preset
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import DecayState, decay_attention, document_attention
from latte.ops.numbers import compute_dtype
from latte.state import State
from latte.tokens import Tokens

#: Keeps the constant of unit features away from 0, so that a query always has weights to divide by.
FLOOR = 1e-6


@register("qt")
class QTMixer(HeadMixer):
    """y_t = sum_s w_ts v_s / sum_s w_ts, w_ts = phi(q_t) . phi(k_s) = 1 + r + r^2 / 2 with r = q_t . k_s / sqrt(K).

    That is the exponential to second order, with K^2 / 2 features: ``exact``. With z = x / K^{1/4} there are also

        fast  phi(x) = [a z . z, sqrt(1 + c^2)] / sqrt(2), a and c learned per head, from 1: K + 1 features
        unit  phi(x) = [z . z / |z . z|, sqrt(s^2 + 1e-6)], s learned per head, from 1

    Fast features leave out r and the products of different channels, so signs are lost. Weights of unit features lie
    between s^2 and 1 + s^2 before they are divided: nearly flat. Linear time in all cases.

    Source: OpenReview V2e0A2XIPF, for images, bidirectional; the causal form is ours, by sums over the tokens so far.
    ``fast`` is that of the paper, without the linear term that its experiments switch off and that could make weights
    negative; ``unit`` is its released code, which also adds gelu(norm(v)) and a table of places, left out here.
    ``exact`` is what ``linear`` has as ``based``.
    """

    @dataclass(frozen=True)
    class Options:
        features: Literal["exact", "fast", "unit"] = "fast"
        key_width: int | None = None  # K, per head; None: head width

    linear_in_values = normalised = True
    directions = ("causal", "bidirectional")
    examples = (
        {},
        {"features": "exact", "key_width": 3, "num_key_value_heads": 1},
        {"features": "unit", "key_width": 3},
        {"bidirectional": True},
        {"features": "exact", "key_width": 2, "bidirectional": True},
    )
    presets: ClassVar[Mapping[str, Preset] | None] = {
        "qt": lambda size: {},
        "qt-exact": lambda size: {"mixer_options": {"features": "exact", "key_width": 16}},
    }
    marks: ClassVar[Mapping[str, Mark]] = dict.fromkeys(("scale", "constant"), Mark(decay=False))

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        self.key_width = config.width if self.options.key_width is None else self.options.key_width
        if self.key_width < 1:
            raise ValueError(f"mixer 'qt': key_width is {self.key_width}, expected at least 1")
        self.q_proj = Linear(config.hidden_size, config.num_heads * self.key_width)
        self.k_proj = Linear(config.hidden_size, config.kv_heads * self.key_width)
        exact, fast = (self.options.features == kind for kind in ("exact", "fast"))
        self.scale = nn.Parameter(torch.empty(config.num_heads)) if fast else None  # a
        self.constant = None if exact else nn.Parameter(torch.empty(config.num_heads))  # c or s
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.scale, self.constant):
            if parameter is not None:
                init.ones_(parameter)

    @property
    def feature_width(self) -> int:
        return second_order_width(self.key_width) if self.options.features == "exact" else self.key_width + 1

    def init_state(self, like_BTD: Tensor) -> DecayState:
        return DecayState.empty(like_BTD, self.config.num_heads, self.feature_width, self.config.width + 1)

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        heads, dtype, after = self.config.num_heads, compute_dtype(x_BTD), None
        q = self._features(split_heads(self.q_proj(x_BTD), heads).to(dtype))
        k = self._features(repeat_heads(split_heads(self.k_proj(x_BTD), self.config.kv_heads), heads).to(dtype))
        # With a 1 behind each value the denominator is one more channel of the sum.
        v = F.pad(repeat_heads(v_BTGV, heads).to(dtype), (0, 1), value=1.0)
        if self.config.bidirectional:
            y_BTHV = document_attention(q, k, v, tokens=tokens)
        else:
            y_BTHV, after = decay_attention(q, k, v, state=state, tokens=tokens)
        norm_BTH1 = tokens.fill_padding(y_BTHV[..., -1:], 1.0)
        return (y_BTHV[..., :-1] / norm_BTH1).to(v_BTGV.dtype), after

    def _features(self, x_BTHK: Tensor) -> Tensor:
        if self.constant is None:
            return second_order(x_BTHK)
        z, constant_H1 = x_BTHK * self.key_width**-0.25, self.constant.to(x_BTHK.dtype)[:, None]
        if self.scale is None:
            parts = F.normalize(F.normalize(z, dim=-1).square(), dim=-1), (constant_H1.square() + FLOOR).sqrt()
        else:
            scale_H1 = self.scale.to(x_BTHK.dtype)[:, None]
            parts = scale_H1 * z.square() * 0.5**0.5, (0.5 * (1 + constant_H1.square())).sqrt()
        return torch.cat([parts[0], parts[1].expand_as(z[..., :1])], dim=-1)

    def flops_per_token(self, context: int) -> int:
        return super().flops_per_token(context) + 4 * self.config.num_heads * self.feature_width * self.config.width
