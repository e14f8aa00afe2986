"""Free energy mixer (2026): beside the mean of past values a soft maximum, chosen between channel by channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, TokenLinear, split_heads
from latte.layers.marks import Mark
from latte.layers.rotary import rotary
from latte.mixers.base import Preset
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import AttentionState, DecayState, decay_attention, softmax_attention
from latte.ops.numbers import compute_dtype
from latte.shapes import require_divides
from latte.state import State
from latte.tokens import Tokens

#: Bounds |beta v|: e to it and its inverse are numbers of float32, so no maximum need be subtracted.
RANGE = 40.0
#: Keeps the features of the linear and gla priors positive, and their decay below 1.
FLOOR = 1e-6
#: Where softplus^-1 of beta starts.
START = 1.8


@register("fem")
class FEMMixer(HeadMixer):
    """o_t = g_t . ((1 - l_t) . m_t + l_t . F_t),  F_t = log(sum_i p_t(i) e^{beta v_i}) / beta,  m_t = sum_i p_t(i) v_i.

    p_t is a causal prior over the past: softmax attention with rotary encoding, linear attention with features
    relu(x) + 1e-6, or the same fading by e^{-relu(x W) - 1e-6} per head and token (gla). m <= F <= max_i v_i: l_t =
    sigmoid(x W_l) lets every channel choose between mean and maximum. One call of the prior, on values [v, e^{beta v}].
    g_t = softplus(x W_g), scaled to a root mean square of 1 per head; beta = softplus(b) per channel.

    Source: arXiv 2602.07160; |beta v| is bounded by 40 there too. Values are as wide as the model, there narrower to
    save parameters. Its low-rank time decay of every input is left out (the released one yields zeros after some 40
    tokens), and so is its bound of -60 on the gla prior's decay, which stops forgetting.
    """

    @dataclass(frozen=True)
    class Options:
        prior: Literal["softmax", "linear", "gla"] = "gla"

    examples = ({}, {"prior": "linear"}, {"prior": "softmax"})
    presets: ClassVar[Mapping[str, Preset] | None] = {
        f"fem-{prior}": lambda size, prior=prior: {"mixer_options": {"prior": prior}}  # type: ignore[misc]
        for prior in ("gla", "linear", "softmax")
    }
    marks: ClassVar[Mapping[str, Mark]] = {"beta": Mark(decay=False, float32=True)}

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        D, H, K = config.hidden_size, config.num_heads, config.width
        self.q_proj, self.k_proj = Linear(D, H * K), Linear(D, H * K)
        self.choice_proj, self.gate_proj = Linear(D, H * K), Linear(D, H * K)
        self.beta = nn.Parameter(torch.empty(H, K))
        self.rotary = None
        if self.options.prior == "softmax":
            require_divides("mixer 'fem'", 2, K, "channels in a pair", "head width")
            self.rotary = rotary(K, config.rope_theta)
        if self.options.prior == "gla":
            self.decay_proj = TokenLinear(D, H)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.constant_(self.beta, START)

    def value_shape(self) -> tuple[int, int]:
        return self.config.num_heads, self.config.width

    def init_state(self, like_BTD: Tensor) -> State:
        H, K = self.config.num_heads, self.config.width
        if self.options.prior == "softmax":
            like_BTD = like_BTD[:, :1].to(compute_dtype(like_BTD))
            return AttentionState.empty(like_BTD, H, K, 2 * K)
        return DecayState.empty(like_BTD, H, K, 2 * K + 1)

    def expectations(self, x_BTD: Tensor, v_BTHV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State]:
        """sum_i p_t(i) v_i for any values, and the prior's state."""
        q, k = (split_heads(p(x_BTD), self.config.num_heads).to(v_BTHV.dtype) for p in (self.q_proj, self.k_proj))
        if self.rotary is not None:
            q, k = (self.rotary.turn(x, tokens) for x in (q, k))
            return softmax_attention(q, k, v_BTHV, state=state, tokens=tokens)
        q, k = F.relu(q) + FLOOR, F.relu(k) + FLOOR
        log_decay = None
        if self.options.prior == "gla":
            log_decay = -F.relu(self.decay_proj(x_BTD).to(v_BTHV.dtype)) - FLOOR
        y, after = decay_attention(q, k, F.pad(v_BTHV, (0, 1), value=1.0), log_decay, state=state, tokens=tokens)
        return y[..., :-1] / tokens.fill_padding(y[..., -1:], 1.0), after

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        dtype, H = compute_dtype(x_BTD), self.config.num_heads
        v, beta_HV = v_BTGV.to(dtype), F.softplus(self.beta.to(dtype)) + FLOOR
        raised = (beta_HV * v).clamp(-RANGE, RANGE).exp()
        both, after = self.expectations(x_BTD, torch.cat([v, raised], dim=-1), state, tokens)
        mean, raised_mean = both.chunk(2, dim=-1)
        free = tokens.fill_padding(raised_mean, 1.0).log() / beta_HV
        choice = torch.sigmoid(split_heads(self.choice_proj(x_BTD), H).to(dtype))
        y_BTHV = mean + choice * (free - mean)
        gate = F.softplus(split_heads(self.gate_proj(x_BTD), H).to(dtype))
        gate = F.rms_norm(gate, gate.shape[-1:], None, self.config.norm_eps)
        return tokens.zero_padding(gate * y_BTHV).to(x_BTD.dtype), after

    def flops_per_token(self, context: int) -> int:
        reads = context if self.options.prior == "softmax" else self.config.width
        return super().flops_per_token(context) + 8 * reads * self.config.num_heads * self.config.width
