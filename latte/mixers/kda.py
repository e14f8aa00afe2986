"""Kimi delta attention (Kimi Team, 2025): the delta rule whose key channels forget at a pace of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from latte.layers.linear import LowRank, split_heads
from latte.layers.marks import Mark
from latte.layers.steps import initial_rate_log, initial_step_bias
from latte.mixers.deltanet import DeltaNetMixer
from latte.mixers.registry import register
from latte.ops.numbers import compute_dtype

#: Where -A of the heads starts: uniform between the two.
RATES = (1.0, 16.0)


@register("kda")
class KDAMixer(DeltaNetMixer):
    """S_t = diag(alpha_t) S_{t-1} + beta_t k_t (v_t - S_{t-1}^T (alpha_t . k_t))^T,  y_t = S_t^T q_t / sqrt(K).

    o_t = W_o (RMSNorm(y_t) . sigmoid(z_t)). alpha_t = e^{A softplus(W_2 W_1 x_t + b)} is one number per head and key
    channel, with one A < 0 per head; z_t is a low-rank projection of x_t; all else is DeltaNet.
    """

    @dataclass(frozen=True)
    class Options(DeltaNetMixer.Options):
        gate_rank: int | None = None  # of decay and output gate; None: the value width of a head

    marks: ClassVar[Mapping[str, Mark]] = dict.fromkeys(("A_log", "dt_bias"), Mark(decay=False, float32=True))
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {},
        {"key_fraction": 1.5, "key_heads": 1, "conv_size": 1, "negative_eigenvalues": True, "gate_rank": 3},
    )

    def build_gates(self) -> None:
        D, H = self.config.hidden_size, self.config.num_heads
        rank = self.value_width if self.options.gate_rank is None else self.options.gate_rank
        if rank < 1:
            raise ValueError(f"mixer {self.name!r}: gate_rank is {rank}, expected at least 1")
        self.decay_proj = LowRank(D, rank, H * self.key_width)
        self.gate_proj = LowRank(D, rank, H * self.value_width)
        self.A_log = nn.Parameter(torch.empty(H))
        self.dt_bias = nn.Parameter(torch.empty(H * self.key_width))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.copy_(self.A_log, initial_rate_log(self.A_log, *RATES))
        init.copy_(self.dt_bias, initial_step_bias(self.dt_bias))

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        wide = compute_dtype(x_BTD)
        step = F.softplus(self.decay_proj(x_BTD).to(wide) + self.dt_bias.to(wide))
        return -self.A_log.to(wide).exp()[:, None] * split_heads(step, self.config.num_heads)

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.o_proj(self.norm(y_BTHV).flatten(2) * torch.sigmoid(self.gate_proj(x_BTD)))
