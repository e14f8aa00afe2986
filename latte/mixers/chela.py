"""CHELA (Liu et al., 2024), our reading: a short, then a long convolution, and one gated head of linear attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.linear import HeadNorm, unit_length
from latte.mixers.base import Preset
from latte.mixers.gated_attention import GatedAttentionMixer, GatedAttentionState
from latte.mixers.registry import register
from latte.ops import ConvState, DecayState, causal_conv, decay_attention, document_attention
from latte.ops.numbers import compute_dtype
from latte.state import State, state
from latte.tokens import Tokens


@state
class ShortLongState(State):
    """The last inputs of both convolutions."""

    short: ConvState
    long: ConvState


@register("chela")
class CHELAMixer(GatedAttentionMixer):
    """out = u . (silu(h + W_h (r . norm(a))) - x), a_t = sum_{s<=t} (q_t . k_s) v_s, m = K_long * silu(K_short * x).

    m is two convolutions of each channel, one behind the other, and (u, z, r, h) are projections of m, through sigmoid,
    silu, silu and nothing; q and k are z scaled and shifted per channel, v = silu(W_v x), and norm is an RMS norm. The
    long kernel is the sum of one of ``long_size`` taps and one of ``short_size`` taps, learned side by side and added
    up before use. If bidirectional, both kernels reach to the right as well, and a is the sum over the document.

    Source: arXiv 2406.08128, of which no code is public. The convolutions, their merging and linear attention under a
    norm in place of a denominator are the paper's; the gates, q, k and v are those of Mega: our reading. Its long
    kernels span the training length; ours have a fixed number of taps, so that a state has one size. q has unit length,
    which the norm behind it undoes: it only keeps numbers in range.
    """

    @dataclass(frozen=True)
    class Options:
        short_size: int = 4  # taps, on each side
        long_size: int = 64
        key_width: int = 64  # Z
        value_expansion: int = 2  # value width over hidden_size

    directions = ("causal", "bidirectional")
    examples = (
        {"long_size": 11, "key_width": 4},
        {"short_size": 1, "long_size": 3, "key_width": 3, "value_expansion": 1},
        {"short_size": 3, "long_size": 5, "key_width": 4, "bidirectional": True},
        {"short_size": 2, "long_size": 2, "key_width": 3, "value_expansion": 3, "bidirectional": True},
    )
    presets: ClassVar[Mapping[str, Preset] | None] = {"chela": lambda size: {"pattern": [["mixer", "gelu"]]}}

    def build_filter(self) -> None:
        options, D, sides = self.options, self.config.hidden_size, 2 if self.config.bidirectional else 1
        if options.short_size < 1:
            raise ValueError(f"mixer 'chela': short_size is {options.short_size}, expected at least 1")
        if options.long_size < options.short_size:
            expected = f"at least short_size ({options.short_size})"
            raise ValueError(f"mixer 'chela': long_size is {options.long_size}, expected {expected}")
        self.short_weight, self.near_weight = (
            nn.Parameter(torch.empty(sides, D, options.short_size)) for _ in range(2)
        )
        self.long_weight = nn.Parameter(torch.empty(sides, D, options.long_size))
        self.norm = HeadNorm(self.config.norm_eps)

    def reset_parameters(self) -> None:
        """The long kernel starts with taps that fade as 1 / distance."""
        super().reset_parameters()
        init.normal_(self.short_weight, std=self.options.short_size**-0.5)
        init.zeros_(self.near_weight)
        long = self.long_weight
        fade_K = 1 / torch.arange(long.shape[-1], 0, -1, dtype=long.dtype, device=long.device)
        init.copy_(long, fade_K / fade_K.norm() * torch.randn_like(long, requires_grad=False))

    def init_state(self, like_BTD: Tensor) -> GatedAttentionState:
        sizes = (self.options.short_size, self.options.long_size)
        tails = (ConvState.empty(like_BTD, size, self.config.hidden_size) for size in sizes)
        return GatedAttentionState(ShortLongState(*tails), DecayState.empty(like_BTD, 1, self.keys, self.values))

    def filtered(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State]:
        before = (None, None) if state is None else (state.short, state.long)
        long_weight = self.long_weight + F.pad(self.near_weight, (self.options.long_size - self.options.short_size, 0))
        near_BTD, short = _convolved(x_BTD, self.short_weight, before[0], tokens)
        m_BTD, long = _convolved(F.silu(near_BTD), long_weight, before[1], tokens)
        return m_BTD, ShortLongState(short, long)

    def attend(
        self, q_BT1Z: Tensor, k_BT1Z: Tensor, v_BT1V: Tensor, state: Any, tokens: Tokens
    ) -> tuple[Tensor, State | None]:
        dtype, after = compute_dtype(v_BT1V), None
        q, k, v = unit_length(q_BT1Z.to(dtype)), k_BT1Z.to(dtype), v_BT1V.to(dtype)
        if self.config.bidirectional:
            a_BT1V = document_attention(q, k, v, tokens=tokens)
        else:
            a_BT1V, after = decay_attention(q, k, v, state=state, tokens=tokens)
        return self.norm(a_BT1V).to(v_BT1V.dtype), after

    def flops_per_token(self, context: int) -> int:
        return super().flops_per_token(context) + 4 * self.keys * self.values


def _convolved(x_BTD: Tensor, weight_SDK: Tensor, state: State | None, tokens: Tokens) -> tuple[Tensor, ConvState]:
    """The sum of a convolution from the left and, with a second kernel, one from the right."""
    y_BTD, after = causal_conv(x_BTD, weight_SDK[0], state=state, tokens=tokens)
    if weight_SDK.shape[0] == 2:
        back_BTD, _ = causal_conv(x_BTD.flip(1), weight_SDK[1], tokens=tokens.reversed)
        y_BTD = y_BTD + back_BTD.flip(1)
    return y_BTD, after
