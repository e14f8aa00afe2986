"""Log-linear attention (Guo et al., 2025) on Gated DeltaNet: memory that grows with the logarithm of what was read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from latte.layers.marks import Mark
from latte.mixers.base import View
from latte.mixers.gated_deltanet import GatedDeltaNetMixer
from latte.mixers.log_linear import LEVEL_MARKS, HasLevels
from latte.mixers.registry import register
from latte.ops import LogLinearState, log_linear_attention
from latte.state import State
from latte.tokens import Tokens


@register("log-linear-gated-deltanet")
class LogLinearGatedDeltaNetMixer(HasLevels, GatedDeltaNetMixer):
    """y_t = sum_l lambda_t^(l) S_t^(l)T q_t,  lambda_t^(l) = softplus(scale_l . W_l x_t) for each head.

    S_t^(0) is beta_t k_t v_t^T, and S_t^(l) what one block of 2^(l-1) earlier tokens wrote. Every token since decayed
    it and erased in it as in Gated DeltaNet; all else is Gated DeltaNet, without the scale of q.
    """

    @dataclass(frozen=True)
    class Options(GatedDeltaNetMixer.Options):
        max_levels: int = 16  # documents have at most 2^(max_levels - 1) tokens

    marks: ClassVar[Mapping[str, Mark]] = {**GatedDeltaNetMixer.marks, **LEVEL_MARKS}
    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {},
        {"value_fraction": 1.0, "key_fraction": 1.5, "key_heads": 1, "negative_eigenvalues": True, "max_levels": 13},
    )

    def build_gates(self) -> None:
        super().build_gates()
        self.build_levels(self.config.num_heads)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.reset_levels()

    def init_memory(self, like_BTD: Tensor) -> LogLinearState:
        return LogLinearState.empty(like_BTD, self.config.num_heads, self.key_width, self.value_width)

    def recur(
        self, x_BTD: Tensor, q: Tensor, k: Tensor, v: Tensor, memory: Any, tokens: Tokens
    ) -> tuple[Tensor, State]:
        log_decay_BTH = self.log_decay(x_BTD)
        written, erased = k * self.rates(x_BTD)[..., None], k * log_decay_BTH.exp()[..., None]
        weights = self.level_weights(x_BTD) * self.key_width**0.5  # takes back the scale of q
        return log_linear_attention(q, written, v, log_decay_BTH, weights, erased, state=memory, tokens=tokens)

    def look(self, x_BTD: Tensor, tokens: Tokens | None = None) -> dict[str, View]:
        """``levels`` beside rates and gates: the weight of each level's block."""
        return super().look(x_BTD, tokens) | {"levels": View("channels", self.level_weights(x_BTD), False)}
