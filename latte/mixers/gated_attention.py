"""What Mega and CHELA share: one head of attention behind a filter of the input, with gates around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, TokenLinear
from latte.layers.marks import Mark
from latte.mixers.base import Mixer
from latte.state import State, state
from latte.tokens import Tokens


@state
class GatedAttentionState(State):
    filter: State
    attention: State


class GatedAttentionMixer(Mixer):
    """out = u . (silu(h + W_h (r . a)) - x), where a is one head of attention with values silu(W_v x).

    (u, z, r, h) are projections of m, the filtered input, through sigmoid, silu, silu and nothing; q and k are z scaled
    and shifted per channel. Subclasses have the options ``key_width`` and ``value_expansion``, and define the filter
    and the attention.
    """

    marks: ClassVar[Mapping[str, Mark]] = dict.fromkeys(("scale", "shift"), Mark(decay=False))

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        options, D = self.options, config.hidden_size
        for name in ("key_width", "value_expansion"):
            if getattr(options, name) < 1:
                raise ValueError(f"mixer {self.name!r}: {name} is {getattr(options, name)}, expected at least 1")
        self.values, self.keys = options.value_expansion * D, options.key_width
        self.build_filter()
        self.v_proj = TokenLinear(D, self.values)
        self.in_proj = TokenLinear(D, 2 * D + self.keys + self.values)
        self.scale, self.shift = (nn.Parameter(torch.empty(2, self.keys)) for _ in range(2))
        self.h_proj = Linear(self.values, D)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.normal_(self.scale, std=0.02)
        init.zeros_(self.shift)

    def build_filter(self) -> None:
        """Parameters of the filter."""
        raise NotImplementedError("an abstract method: every gated attention defines it")

    def filtered(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State]:
        """m (B, T, D), and the filter's state."""
        raise NotImplementedError("an abstract method: every gated attention defines it")

    def attend(
        self, q_BT1Z: Tensor, k_BT1Z: Tensor, v_BT1V: Tensor, state: Any, tokens: Tokens
    ) -> tuple[Tensor, State | None]:
        """a (B, T, 1, V), and the attention's state."""
        raise NotImplementedError("an abstract method: every gated attention defines it")

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        D = self.config.hidden_size
        m_BTD, filter_ = self.filtered(x_BTD, None if state is None else state.filter, tokens)
        u, z, r, h = self.in_proj(m_BTD).to(x_BTD.dtype).split([D, self.keys, self.values, D], dim=-1)
        q_BT1Z, k_BT1Z = (F.silu(z)[:, :, None] * self.scale + self.shift).split(1, dim=2)
        v_BT1V = F.silu(self.v_proj(x_BTD).to(x_BTD.dtype))[:, :, None]
        before = None if state is None else state.attention
        a_BT1V, attention = self.attend(q_BT1Z, k_BT1Z, v_BT1V, before, tokens)
        h_BTD = F.silu(h + self.h_proj(F.silu(r) * a_BT1V[:, :, 0]))
        y_BTD = tokens.zero_padding(torch.sigmoid(u) * (h_BTD - x_BTD))
        return y_BTD, None if attention is None else GatedAttentionState(filter_, attention)
