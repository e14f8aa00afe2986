"""ZeroS (2026): linear attention under weights that sum to zero, so that heads can subtract and not only average."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, TokenLinear, split_heads
from latte.layers.marks import Mark
from latte.layers.rotary import rotary
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import DecayState, LogSumState, ScanState, decay_attention, diagonal_scan, log_sum
from latte.ops.log_sum import FORGOTTEN
from latte.ops.numbers import compute_dtype, wide_dtype
from latte.shapes import require_divides
from latte.state import State, state
from latte.tokens import Tokens

#: The source's. Heads are differences of means, near 0 where a document begins: a smaller one would magnify rounding.
NORM_EPS = 1e-5


@state
class ZeroSState(State):
    """Means of u and of the logits, the log of the logits' exponentials, and two means of k v^T."""

    direction: ScanState
    logits: ScanState
    log_sum: LogSumState
    softmax: DecayState
    plain: DecayState


@register("zeros")
class ZeroSMixer(HeadMixer):
    """y_t = sum_{i<=t} r_ti (q_t . k_i) v_i with unit q and k, r_ti = g1_t d_ti/t + gh_t (softmax_i(s) - 1/t - d_ti/t).

    d_ti = s_i - mean_{j<=t} s_j, so the weights r sum to 0 over i; g1 and gh are sigmoids per head. The logits are
    s_i = -u_i . m_i / sqrt(K), u = x W_u, m_i the mean of u up to i and of e^tau virtual copies of a learned mu.
    A document's first token gives 0. Heads are normed to mean 0 and variance 1.

    Computed from means, y = q^T (gh (F - H) + (g1 - gh) (G - mean(s) H)) with F the softmax mean of k v^T and G, H
    the plain means of s k v^T and k v^T, in float64, since their differences are small; the sums of arXiv 2602.05230
    grow without bound. The released code subtracts
    the largest logit of the whole row, which the future decides; here sums are logs. Its zero-order term is left out.
    """

    @dataclass(frozen=True)
    class Options:
        rope: bool = True

    linear_in_values = True
    silent_start = True
    examples = ({}, {"rope": False})
    marks = {name: Mark(decay=False) for name in ("mu", "tau")}  # noqa: RUF012

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        if self.options.rope:
            require_divides("mixer 'zeros'", 2, config.width, "channels in a pair", "head width")
        width = config.num_heads * config.width
        self.q_proj, self.k_proj, self.u_proj = (Linear(config.hidden_size, width) for _ in range(3))
        self.gate_proj = TokenLinear(config.hidden_size, 2 * config.num_heads)
        self.mu = nn.Parameter(torch.empty(config.num_heads, config.width))
        self.tau = nn.Parameter(torch.empty(config.num_heads))
        self.rotary = rotary(config.width, config.rope_theta) if self.options.rope else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.zeros_(self.mu)
        init.zeros_(self.tau)

    def value_shape(self) -> tuple[int, int]:
        return self.config.num_heads, self.config.width

    def init_state(self, like_BTD: Tensor) -> ZeroSState:
        H, K = self.config.num_heads, self.config.width
        wide_BTD = like_BTD[:, :1].to(wide_dtype(like_BTD.device))
        return ZeroSState(
            ScanState.empty(like_BTD, H * K),
            ScanState.empty(wide_BTD, H),
            LogSumState.empty(wide_BTD, H),
            DecayState.empty(wide_BTD, H, K, K),
            DecayState.empty(wide_BTD, H, K, 2 * K),
        )

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.o_proj(F.layer_norm(y_BTHV, y_BTHV.shape[-1:], eps=NORM_EPS).flatten(2))

    def logits(
        self, x_BTD: Tensor, count_BT1: Tensor, log_kept_BT1: Tensor, state: ScanState | None, tokens: Tokens
    ) -> tuple[Tensor, ScanState]:
        """s (B, T, H)."""
        dtype = compute_dtype(x_BTD)
        u_BTD, count_BT1, log_kept_BT1 = self.u_proj(x_BTD).to(dtype), count_BT1.to(dtype), log_kept_BT1.to(dtype)
        fade_BTD = log_kept_BT1.expand_as(u_BTD)
        mean_BTD, after = diagonal_scan(fade_BTD, u_BTD / count_BT1, state=state, tokens=tokens)
        u_BTHK, mean_BTHK = (split_heads(x, self.config.num_heads) for x in (u_BTD, mean_BTD))
        virtual_H1 = self.tau.to(u_BTD.dtype).clamp(max=20.0).exp()[:, None]
        count_BT11 = count_BT1[..., None]
        mean_BTHK = (virtual_H1 * self.mu + count_BT11 * mean_BTHK) / (virtual_H1 + count_BT11)
        return -(u_BTHK * mean_BTHK).sum(-1) * self.config.width**-0.5, after

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        H, wide = self.config.num_heads, wide_dtype(x_BTD.device)
        count_BT1 = tokens.count_BT.clamp(min=1)[..., None].to(wide)
        # What a mean over t tokens keeps of the one over t - 1.
        log_kept_BT1 = torch.log1p(-1 / count_BT1).clamp(min=FORGOTTEN)
        empty = (None,) * 5
        direction, means, sums, soft, plain = empty if state is None else (getattr(state, n) for n in state._names)
        s_BTH, direction = self.logits(x_BTD, count_BT1, log_kept_BT1, direction, tokens)
        s_BTH = s_BTH.to(wide)
        fade_BTH = log_kept_BT1.expand_as(s_BTH)
        mean_BTH, means = diagonal_scan(fade_BTH, s_BTH / count_BT1, state=means, tokens=tokens)
        share_BTH, kept_BTH, sums = log_sum(s_BTH, state=sums, tokens=tokens)
        q, k = (F.normalize(split_heads(p(x_BTD), H), dim=-1, eps=1e-6).to(wide) for p in (self.q_proj, self.k_proj))
        if self.rotary is not None:
            q, k = (self.rotary.turn(x, tokens) for x in (q, k))
        v = v_BTGV.to(wide)
        F_BTHV, soft = decay_attention(q, k * share_BTH[..., None], v, kept_BTH, state=soft, tokens=tokens)
        both_BTHV = torch.cat([s_BTH[..., None] * v, v], dim=-1)
        GH, plain = decay_attention(q, k / count_BT1[..., None], both_BTHV, fade_BTH, state=plain, tokens=tokens)
        G_BTHV, H_BTHV = GH.chunk(2, dim=-1)
        first, high = torch.sigmoid(self.gate_proj(x_BTD).to(wide))[..., None].chunk(2, dim=2)
        y_BTHV = high * (F_BTHV - H_BTHV) + (first - high) * (G_BTHV - mean_BTH[..., None] * H_BTHV)
        # A first token's weights cancel; what rounding leaves of them, the norm would blow up.
        y_BTHV = torch.where(count_BT1[..., None] == 1, 0.0, y_BTHV)
        after = ZeroSState(direction, means, sums, soft, plain)
        return tokens.zero_padding(y_BTHV).to(x_BTD.dtype), after
