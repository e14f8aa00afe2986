"""Linear attention (Katharopoulos et al., 2020): the undirected latent model, of which Latte is the directed one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, repeat_heads, split_heads
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import DecayState, decay_attention, document_attention
from latte.state import State
from latte.tokens import Tokens


@register("linear")
class LinearMixer(HeadMixer):
    """y_t = sum_s phi(q_t).phi(k_s) v_s / sum_s phi(q_t).phi(k_s), equations (4) and (5), with phi > 0.

    The denominator rides along as one more value, a constant 1.
    """

    @dataclass(frozen=True)
    class Options:
        #: Added to elu(x) + 1, so that features stay positive where that underflows and the ratio is always defined.
        floor: float = 1e-6

    linear_in_values = normalised = True
    directions = ("causal", "bidirectional")
    examples = ({}, {"floor": 1e-3, "num_key_value_heads": 1}, {"bidirectional": True})

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        if self.options.floor <= 0:
            raise ValueError(f"mixer 'linear': floor is {self.options.floor}, expected a positive number")
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.width)
        self.k_proj = Linear(config.hidden_size, config.kv_heads * config.width)

    def init_state(self, like_BTD: Tensor) -> DecayState:
        return DecayState.empty(like_BTD, self.config.num_heads, self.config.width, self.config.width + 1)

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        heads = self.config.num_heads
        q_BTHK = self._features(split_heads(self.q_proj(x_BTD), heads))
        k_BTHK = repeat_heads(self._features(split_heads(self.k_proj(x_BTD), self.config.kv_heads)), heads)
        v_BTHV = F.pad(repeat_heads(v_BTGV, heads), (0, 1), value=1.0)
        if self.config.bidirectional:
            y_BTHV, after = document_attention(q_BTHK, k_BTHK, v_BTHV, tokens=tokens), None
        else:
            y_BTHV, after = decay_attention(q_BTHK, k_BTHK, v_BTHV, state=state, tokens=tokens)
        sums_BTHV, norm_BTH1 = y_BTHV[..., :-1], y_BTHV[..., -1:]
        return sums_BTHV / tokens.fill_padding(norm_BTH1, 1.0), after  # padding came out as 0 / 0

    def _features(self, x: Tensor) -> Tensor:
        return F.elu(x) + (1 + self.options.floor)
