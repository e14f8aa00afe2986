"""Log-linear attention (Guo et al., 2025) on Mamba-2: memory that grows with the logarithm of what was read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, split_heads
from latte.layers.marks import Mark
from latte.mixers.base import View
from latte.mixers.mamba2 import Mamba2Mixer
from latte.mixers.registry import register
from latte.ops import LogLinearState, log_linear_attention
from latte.ops.numbers import compute_dtype
from latte.state import State
from latte.tokens import Tokens

#: Of the parameters of :class:`HasLevels`.
LEVEL_MARKS = {"level_scale": Mark(decay=False)}


class HasLevels:
    """What mixers with blocks of doubling size share: lambda_t^(l) = softplus(scale_l . W_l x_t) for each head."""

    config: MixerConfig
    options: Any
    name: str

    def build_levels(self, heads: int) -> None:
        levels = self.options.max_levels
        if levels < 1:
            raise ValueError(f"mixer {self.name!r}: max_levels is {levels}, expected at least 1")
        self.level_heads = heads
        self.level_proj = Linear(self.config.hidden_size, heads * levels)
        self.level_scale = nn.Parameter(torch.empty(heads * levels))

    def reset_levels(self) -> None:
        init.ones_(self.level_scale)

    def level_weights(self, x_BTD: Tensor) -> Tensor:
        """lambda (B, T, H, L)."""
        logits = (self.level_scale * self.level_proj(x_BTD)).to(compute_dtype(x_BTD))
        return split_heads(F.softplus(logits), self.level_heads)


@register("log-linear-mamba2")
class LogLinearMamba2Mixer(HasLevels, Mamba2Mixer):
    """y_t = sum_l lambda_t^(l) C_t^T S_t^(l) + D x_t,  lambda_t^(l) = softplus(scale_l . W_l u_t) for each head.

    S_t^(0) is Mamba-2's B_t (Delta_t x_t)^T, and S_t^(l) its state over one block of 2^(l-1) earlier tokens: recent
    tokens are in small blocks, old ones in large blocks. All else is Mamba-2.
    """

    @dataclass(frozen=True)
    class Options(Mamba2Mixer.Options):
        max_levels: int = 16  # documents have at most 2^(max_levels - 1) tokens

    examples = (
        {"state_size": 3},
        {"state_size": 4, "expand": 1, "num_groups": 2, "conv_size": 2, "head_dim": 4, "max_levels": 13},
    )
    presets = {"log-linear-mamba2": Mamba2Mixer.presets["mamba2"]}  # noqa: RUF012
    marks = {**Mamba2Mixer.marks, **LEVEL_MARKS}  # noqa: RUF012

    def build_memory(self) -> None:
        self.build_levels(self.num_heads)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_levels()

    def init_memory(self, like_BTD: Tensor) -> LogLinearState:
        return LogLinearState.empty(like_BTD, self.num_heads, self.options.state_size, self.config.width)

    def recur(
        self, u_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, memory: Any, tokens: Tokens
    ) -> tuple[Tensor, State]:
        return log_linear_attention(q, k, v, log_decay, self.level_weights(u_BTD), state=memory, tokens=tokens)

    def look(self, x_BTD: Tensor, tokens: Tokens | None = None) -> dict[str, View]:
        """``levels`` beside the gates: the weight of each level's block."""
        return super().look(x_BTD, tokens) | {"levels": View("channels", self.level_weights(x_BTD), False)}
