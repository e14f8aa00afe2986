"""Linear attention (Katharopoulos et al., 2020): the undirected latent model, of which Latte is the directed one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.mixers.base import Mixer, MixerConfig, register
from latte.mixers.layers import Linear, repeat_heads, split_heads
from latte.ops import DecayState, decay_attention, document_attention
from latte.ops.tokens import segment_ids
from latte.state import State, require_state


@register("linear")
class LinearMixer(Mixer):
    """y_t = sum_s phi(q_t).phi(k_s) v_s / sum_s phi(q_t).phi(k_s), equations (4) and (5), with phi > 0.

    The denominator rides along as one more value, a constant 1.
    """

    @dataclass(frozen=True)
    class Options:
        #: Added to elu(x) + 1, so that features stay positive where that underflows and the ratio is always defined.
        floor: float = 1e-6

    normalised = True
    directions = ("causal", "bidirectional")
    examples = ({}, {"floor": 1e-3, "num_key_value_heads": 1}, {"bidirectional": True})

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        if self.options.floor <= 0:
            raise ValueError(f"mixer 'linear': floor is {self.options.floor}, expected a positive number")
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.width)
        self.k_proj = Linear(config.hidden_size, config.kv_heads * config.width)
        self.v_proj = Linear(config.hidden_size, config.kv_heads * config.width)
        self.o_proj = Linear(config.num_heads * config.width, config.hidden_size, residual=True)

    def values(self, x_BTD: Tensor) -> Tensor:
        return split_heads(self.v_proj(x_BTD), self.config.kv_heads)

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.o_proj(y_BTHV.flatten(2))

    def init_state(self, like_BTD: Tensor) -> DecayState:
        return DecayState.empty(like_BTD, self.config.num_heads, self.config.width, self.config.width + 1)

    def mix(
        self,
        x_BTD: Tensor,
        values_BTGV: Tensor | None,
        state: State | None,
        mask: Tensor | None,
        reset: Tensor | None,
    ) -> tuple[Tensor, State | None]:
        heads = self.config.num_heads
        before = None if state is None else require_state("mixer 'linear'", state, self.init_state(x_BTD))
        q_BTHK = self._features(split_heads(self.q_proj(x_BTD), heads))
        k_BTHK = repeat_heads(self._features(split_heads(self.k_proj(x_BTD), self.config.kv_heads)), heads)
        v_BTHV = repeat_heads(self.values(x_BTD) if values_BTGV is None else values_BTGV, heads)
        v_BTHV = F.pad(v_BTHV, (0, 1), value=1.0)
        if self.config.bidirectional:
            segments = None if reset is None else segment_ids(reset, x_BTD)
            y_BTHV, after = document_attention(q_BTHK, k_BTHK, v_BTHV, mask=mask, segments=segments), None
        else:
            y_BTHV, after = decay_attention(q_BTHK, k_BTHK, v_BTHV, state=before, mask=mask, reset=reset)
        sums_BTHV, norm_BTH1 = y_BTHV[..., :-1], y_BTHV[..., -1:]
        if mask is not None:  # padding came out as 0 / 0
            norm_BTH1 = torch.where(mask[..., None, None], norm_BTH1, 1.0)
        return sums_BTHV / norm_BTH1, after

    def _features(self, x: Tensor) -> Tensor:
        return F.elu(x) + (1 + self.options.floor)
