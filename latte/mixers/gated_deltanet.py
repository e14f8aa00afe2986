"""Gated DeltaNet (Yang et al., 2025): the delta rule with one decay per head, and a gated output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from latte.layers.linear import Linear
from latte.layers.marks import Mark
from latte.layers.steps import initial_rate_log, initial_step_bias
from latte.mixers.deltanet import DeltaNetMixer
from latte.mixers.registry import register
from latte.ops.numbers import compute_dtype

#: Where -A of the heads starts: uniform between the two, and away from 0, whose logarithm is no number.
RATES = (0.01, 16.0)


@register("gated-deltanet")
class GatedDeltaNetMixer(DeltaNetMixer):
    """S_t = alpha_t S_{t-1} + beta_t k_t (v_t - alpha_t S_{t-1}^T k_t)^T,  o_t = W_o (RMSNorm(y_t) . SiLU(W_g x_t)).

    alpha_t = e^{A softplus(W_a x_t + b)}, A < 0, is one number per head; all else is DeltaNet. Keys of all heads are
    three quarters as wide as the model and values twice as wide as keys, which makes 6 hidden_size^2 parameters.
    """

    @dataclass(frozen=True)
    class Options(DeltaNetMixer.Options):
        key_fraction: float = 0.75
        value_fraction: float = 1.5

    marks: ClassVar[Mapping[str, Mark]] = dict.fromkeys(("A_log", "dt_bias"), Mark(decay=False, float32=True))
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {},
        {"key_fraction": 1.5, "value_fraction": 1.0, "key_heads": 1, "conv_size": 1, "negative_eigenvalues": True},
    )

    def build_gates(self) -> None:
        D, H = self.config.hidden_size, self.config.num_heads
        self.a_proj = Linear(D, H)
        self.g_proj = Linear(D, H * self.value_width)
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(H)) for _ in range(2))

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init.copy_(self.A_log, initial_rate_log(self.A_log, *RATES))
        init.copy_(self.dt_bias, initial_step_bias(self.dt_bias))

    def log_decay(self, x_BTD: Tensor) -> Tensor:
        wide = compute_dtype(x_BTD)
        step_BTH = F.softplus(self.a_proj(x_BTD).to(wide) + self.dt_bias.to(wide))
        return -self.A_log.to(wide).exp() * step_BTH

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.o_proj(self.norm(y_BTHV).flatten(2) * F.silu(self.g_proj(x_BTD)))
