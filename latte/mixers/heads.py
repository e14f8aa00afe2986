"""Mixers of heads: values mixed per head along the tokens, then projected back to the model's width."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, split_heads
from latte.mixers.base import Mixer, View
from latte.state import State
from latte.tokens import Tokens, require_tokens


class HeadMixer(Mixer):
    """A mixer that is a function of values (B, T, G, V) and gives heads (B, T, H, V).

    Subclasses define :meth:`mix_heads`, and :meth:`value_shape` where values have other heads or widths.
    """

    #: Heads are linear in the values: y_t = sum_s w_ts v_s, and :meth:`look` shows w.
    linear_in_values: ClassVar[bool] = False
    #: The weights are convex besides: at least 0, and they sum to 1.
    normalised: ClassVar[bool] = False

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        self.value_heads, self.value_width = self.value_shape()
        self.build_projections()

    def value_shape(self) -> tuple[int, int]:
        """G and V of the values."""
        return self.config.kv_heads, self.config.width

    def build_projections(self) -> None:
        """Those of values and output."""
        self.v_proj = Linear(self.config.hidden_size, self.value_heads * self.value_width)
        self.o_proj = Linear(self.config.num_heads * self.value_width, self.config.hidden_size, residual=True)

    def values(self, x_BTD: Tensor) -> Tensor:
        """What is mixed: (B, T, G, V)."""
        return split_heads(self.v_proj(x_BTD), self.value_heads)

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        """Heads (B, T, H, V) and the state after these tokens. Where heads are linear in the values, V may be any."""
        raise NotImplementedError("an abstract method: every mixer of heads defines it")

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        """From heads back to the model's width."""
        return self.o_proj(y_BTHV.flatten(2))

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        y_BTHV, after = self.mix_heads(x_BTD, self.values(x_BTD), state, tokens)
        return self.project(y_BTHV, x_BTD), after

    def look(self, x_BTD: Tensor, tokens: Tokens | None = None) -> dict[str, View]:
        """``weights``: how much of the value of token s is in each head of token t."""
        if not self.linear_in_values:
            return {}
        tokens = require_tokens(f"mixer {self.name!r}", tokens, x_BTD)
        weights_BTHS, _ = self.mix_heads(x_BTD, self.unit_values(x_BTD), None, tokens)
        return {"weights": View("weights", weights_BTHS.transpose(1, 2), self.normalised)}

    def unit_values(self, x_BTD: Tensor) -> Tensor:
        """Values that are unit vectors, one per token: what is linear in the values then shows its weights."""
        B, T = x_BTD.shape[:2]
        unit_TS = torch.eye(T, dtype=x_BTD.dtype, device=x_BTD.device)
        return unit_TS[:, None].expand(B, T, self.value_heads, T)
