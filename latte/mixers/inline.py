"""InLine attention (Han et al., 2024): linear attention whose weights sum to 1 by a shift, not by a division."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, repeat_heads, split_heads
from latte.mixers.base import Preset
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import DecayState, decay_attention, document_attention
from latte.ops.numbers import compute_dtype
from latte.state import State
from latte.tokens import Tokens


@register("inline")
class InLineMixer(HeadMixer):
    """y_t = sum_s w_ts v_s, w_ts = (phi(q_t) . phi(k_s) / sqrt(K) - mean_s(phi(q_t) . phi(k_s) / sqrt(K)) + 1) / n.

    The n tokens s are those of the document; causal, those up to t. The weights sum to 1 and may have any sign. With a
    division instead, q and 2 q give the same weights where phi(2 q) = 2 phi(q); here different queries give different
    weights. Linear time: sums of phi(k) v^T, phi(k) and v ride in one matrix, and n is the count of real tokens.

    Source: arXiv 2412.06590, for images, bidirectional; the causal form is ours, with sums over the tokens so far. Its
    3 x 3 term of neighbours in the image is left out, and so are exponential features, which overflow.
    """

    @dataclass(frozen=True)
    class Options:
        features: Literal["identity", "relu"] = "identity"

    linear_in_values = True
    directions = ("causal", "bidirectional")
    examples = (
        {},
        {"features": "relu", "num_key_value_heads": 1},
        {"bidirectional": True},
        {"features": "relu", "num_key_value_heads": 1, "bidirectional": True},
    )
    presets: ClassVar[Mapping[str, Preset] | None] = {"inline": lambda size: {}}

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.width)
        self.k_proj = Linear(config.hidden_size, config.kv_heads * config.width)

    def init_state(self, like_BTD: Tensor) -> DecayState:
        return DecayState.empty(like_BTD, self.config.num_heads, self.config.width + 1, self.config.width + 1)

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        heads, dtype, scale = self.config.num_heads, compute_dtype(x_BTD), self.config.width**-0.5
        q_BTHK = scale * self._features(split_heads(self.q_proj(x_BTD), heads).to(dtype))
        k_BTHK = self._features(split_heads(self.k_proj(x_BTD), self.config.kv_heads).to(dtype))
        v_BTHV = repeat_heads(v_BTGV, heads).to(dtype)
        # With a 1 behind each k and v, one sum holds those of k v^T, k and v; two reads of it give all that is needed.
        k, v = F.pad(repeat_heads(k_BTHK, heads), (0, 1), value=1.0), F.pad(v_BTHV, (0, 1), value=1.0)
        one_BTH1 = torch.ones_like(q_BTHK[..., :1])
        query = torch.cat([q_BTHK, torch.zeros_like(one_BTH1)], dim=-1)
        count = torch.cat([torch.zeros_like(q_BTHK), one_BTH1], dim=-1)
        if self.config.bidirectional:
            (read, totals), after = (document_attention(x, k, v, tokens=tokens) for x in (query, count)), None
        else:
            totals, _ = decay_attention(count, k, v, state=state, tokens=tokens)
            read, after = decay_attention(query, k, v, state=state, tokens=tokens)
        n_BTH1 = tokens.fill_padding(totals[..., -1:], 1.0)
        y_BTHV = (read[..., :-1] + (1 - read[..., -1:] / n_BTH1) * totals[..., :-1]) / n_BTH1
        return y_BTHV.to(v_BTGV.dtype), after

    def _features(self, x_BTHK: Tensor) -> Tensor:
        return F.relu(x_BTHK) if self.options.features == "relu" else x_BTHK

    def flops_per_token(self, context: int) -> int:
        return super().flops_per_token(context) + 8 * self.config.num_heads * (self.config.width + 1) ** 2
