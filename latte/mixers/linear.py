"""Linear attention (Katharopoulos et al., 2020): the undirected latent model, of which Latte is the directed one."""

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
from latte.layers.taylor import second_order, second_order_width
from latte.mixers.base import Preset
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import DecayState, decay_attention, document_attention
from latte.state import State
from latte.tokens import Tokens


@register("linear")
class LinearMixer(HeadMixer):
    """y_t = sum_s phi(q_t).phi(k_s) v_s / sum_s phi(q_t).phi(k_s), equations (4) and (5), with phi(q).phi(k) > 0.

        elu       phi(x) = elu(x) + 1
        hedgehog  phi(x) = [softmax(W x), softmax(-W x)], W per head, from the identity (arXiv 2402.04347; two softmaxes
                  as in LoLCATs, where flash-linear-attention has one over both halves: other weights)
        based     phi(x) = [1, z, (z_i z_j)_{i<=j}], z = x / K^{1/4}: phi(q).phi(k) = 1 + r + r^2/2, r = q.k / sqrt(K),
                  the exponential to second order (arXiv 2402.18668), at least 1/2

    The denominator rides along as one more value, a constant 1. ``key_width`` is that of q and k before phi.
    """

    @dataclass(frozen=True)
    class Options:
        #: Added to elu(x) + 1 and to softmaxes, so that features stay positive where they underflow and the ratio is
        #: always defined.
        floor: float = 1e-6
        features: Literal["elu", "hedgehog", "based"] = "elu"
        key_width: int | None = None  # per head; None: head width

    linear_in_values = normalised = True
    directions = ("causal", "bidirectional")
    examples = (
        {},
        {"floor": 1e-3, "num_key_value_heads": 1},
        {"bidirectional": True},
        {"features": "hedgehog", "num_key_value_heads": 1},
        {"features": "based", "key_width": 3},
        {"features": "hedgehog", "key_width": 2, "bidirectional": True},
    )
    presets: ClassVar[Mapping[str, Preset] | None] = {
        "linear": lambda size: {},
        "hedgehog": lambda size: {"mixer_options": {"features": "hedgehog"}},
        "based": lambda size: {"mixer_options": {"features": "based", "key_width": 16}},
    }

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        if self.options.floor <= 0:
            raise ValueError(f"mixer 'linear': floor is {self.options.floor}, expected a positive number")
        self.key_width = config.width if self.options.key_width is None else self.options.key_width
        if self.key_width < 1:
            raise ValueError(f"mixer 'linear': key_width is {self.key_width}, expected at least 1")
        self.q_proj = Linear(config.hidden_size, config.num_heads * self.key_width)
        self.k_proj = Linear(config.hidden_size, config.kv_heads * self.key_width)
        if self.options.features == "hedgehog":
            self.q_map = nn.Parameter(torch.empty(config.num_heads, self.key_width, self.key_width))
            self.k_map = nn.Parameter(torch.empty(config.kv_heads, self.key_width, self.key_width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.options.features == "hedgehog":
            for weight in (self.q_map, self.k_map):
                init.copy_(
                    weight, torch.eye(self.key_width, dtype=weight.dtype, device=weight.device).expand_as(weight)
                )

    @property
    def feature_width(self) -> int:
        K = self.key_width
        return {"elu": K, "hedgehog": 2 * K, "based": second_order_width(K)}[self.options.features]

    def init_state(self, like_BTD: Tensor) -> DecayState:
        return DecayState.empty(like_BTD, self.config.num_heads, self.feature_width, self.config.width + 1)

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        heads = self.config.num_heads
        q_BTHK = self._features(split_heads(self.q_proj(x_BTD), heads), "q_map")
        k_BTHK = repeat_heads(self._features(split_heads(self.k_proj(x_BTD), self.config.kv_heads), "k_map"), heads)
        v_BTHV = F.pad(repeat_heads(v_BTGV, heads), (0, 1), value=1.0)
        if self.config.bidirectional:
            y_BTHV, after = document_attention(q_BTHK, k_BTHK, v_BTHV, tokens=tokens), None
        else:
            y_BTHV, after = decay_attention(q_BTHK, k_BTHK, v_BTHV, state=state, tokens=tokens)
        sums_BTHV, norm_BTH1 = y_BTHV[..., :-1], y_BTHV[..., -1:]
        return sums_BTHV / tokens.fill_padding(norm_BTH1, 1.0), after  # padding came out as 0 / 0

    def _features(self, x_BTHK: Tensor, weight: str) -> Tensor:
        if self.options.features == "elu":
            return F.elu(x_BTHK) + (1 + self.options.floor)
        if self.options.features == "hedgehog":
            mapped = torch.einsum("bthk,hjk->bthj", x_BTHK, getattr(self, weight)).to(x_BTHK.dtype)
            return torch.cat([mapped.softmax(-1), (-mapped).softmax(-1)], dim=-1) + self.options.floor
        return second_order(x_BTHK)
