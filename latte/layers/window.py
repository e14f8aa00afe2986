"""Sliding-window attention as a part of mixers: projections, rotary encoding, and the window op."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, split_heads
from latte.layers.rotary import Rotary, rotary
from latte.modes import values_hidden
from latte.ops import Far, KeptState, WindowState, kept_attention, window_attention
from latte.ops.numbers import compute_dtype
from latte.shapes import require_divides
from latte.tokens import Tokens

#: Tokens to which recencies refer: a weight of a single token would be too small for narrow types.
PLACES = 1000
#: Largest logarithm of a lifetime, in PLACES tokens: five hundred million times as many.
LONGEST = 20.0
#: By how much a lifetime is shorter for each place: of two tokens with the same content the earlier one wins by more
#: than their products may differ by rounding, in whatever form they are computed.
LATER = 1e-5


class Window(nn.Module):
    """p_0(s|t), equation (17): softmax attention to the last ``size`` tokens and the present one; values from outside.

    Sinks are looked at from place min(t, sinks + size): as if right behind a full window, however far they are, because
    a pretrained model was trained on no other distances. Where tokens are kept within a ``reach``, they are looked at
    from min(t, reach), since they then compete with tokens that are as far away.

    Behind the window ``kept`` tokens stay in sight, those with the best scores W_s x + r place per key/value head; the
    scores, times a learned weight, are added to their logits. With a recency r > 0 a token needs a better score the
    older it is. With ``received`` scores also hold the log of the attention that a token got while the window saw it,
    times a weight that starts there. A kept token further back than ``reach`` is looked at as if it were that far.

    With ``recall`` a token also has a lifetime e^(W_l x + b), in PLACES tokens, for which it stays however old it is:
    its score is at least level + r e^(W_l x + b), that of a token of score ``level`` which stands at the end of it.
    """

    def __init__(
        self,
        config: MixerConfig,
        size: int,
        sinks: int = 0,
        softcap: float | None = None,
        rope: bool = True,
        kept: int = 0,
        reach: int | None = None,
        score_weight: float = 0.0,
        received: float | None = None,
        recall: bool = False,
    ) -> None:
        super().__init__()
        if size < 0 or sinks < 0:
            raise ValueError(f"window is {size} and sinks is {sinks}, expected at least 0 for both")
        if sinks and config.bidirectional:
            raise ValueError(f"sinks is {sinks}, expected 0: a bidirectional window has none")
        if kept < 0:
            raise ValueError(f"kept is {kept}, expected at least 0")
        if kept and config.bidirectional:
            raise ValueError(f"kept is {kept}, expected 0: a bidirectional window keeps nothing behind it")
        if kept and reach is not None and reach <= size:
            raise ValueError(f"reach is {reach}, expected more than the window ({size}), or none")
        if rope:
            require_divides("rotary encoding", 2, config.width, "channels in a pair", "head width")
        self.config, self.size, self.sinks, self.softcap, self.rope = config, size, sinks, softcap, rope
        self._rotary: Rotary | None = rotary(config.width, config.rope_theta) if rope else None
        self.scale: float | None = None  # of queries times keys; None: 1/sqrt(width)
        self._build_projections()
        self.kept, self.reach, self.first_weights = kept, reach, (score_weight, received)
        self.score_proj = Linear(config.hidden_size, config.kv_heads) if kept else None
        self.score_weight = nn.Parameter(torch.full((config.kv_heads,), float(score_weight))) if kept else None
        # By how much a token's score exceeds that of a token PLACES earlier with the same content.
        self.score_recency = nn.Parameter(torch.zeros(config.kv_heads)) if kept else None
        self.lifetime_proj = Linear(config.hidden_size, config.kv_heads) if kept and recall else None
        self.lifetime_bias = nn.Parameter(torch.zeros(config.kv_heads)) if kept and recall else None
        self.recall_level = nn.Parameter(torch.zeros(config.kv_heads)) if kept and recall else None
        self.received_weight: nn.Parameter | None = None
        if kept and received is not None:
            self.received_weight = nn.Parameter(torch.full((config.kv_heads,), float(received)))

    def reset_parameters(self) -> None:
        for weight, start in zip((self.score_weight, self.received_weight), self.first_weights, strict=True):
            if weight is not None and start is not None:
                init.constant_(weight, start)
        for zero in (self.score_recency, self.lifetime_bias, self.recall_level):
            if zero is not None:
                init.zeros_(zero)

    def _build_projections(self) -> None:
        config = self.config
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.width)
        self.k_proj = Linear(config.hidden_size, config.kv_heads * config.width)

    def queries_and_keys(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, H, K) and (B, T, G, K), not turned by their places yet."""
        return split_heads(self.q_proj(x_BTD), self.config.num_heads), split_heads(
            self.k_proj(x_BTD), self.config.kv_heads
        )

    @property
    def rotary(self) -> Rotary:
        assert self._rotary is not None, "a window with rope; a pretrained model sets it before the first token"
        return self._rotary

    @property
    def farthest(self) -> int:
        """The place from which sinks are looked at by queries behind it."""
        return self.reach if self.kept and self.reach is not None else self.sinks + self.size

    def init_state(self, like_BTD: Tensor) -> Any:
        heads, width = self.config.kv_heads, self.config.width
        if self.kept:
            sizes = (self.size, self.sinks, self.kept, heads, width, width)
            return KeptState.empty(like_BTD, *sizes, received=self.received_weight is not None)
        return WindowState.empty(like_BTD, self.size, self.sinks, heads, width, width)

    def scores(self, x_BTD: Tensor, tokens: Tokens) -> Tensor | None:
        """How much each token is worth keeping, (B, T, G), at least float32; None where nothing is kept."""
        if not self.kept or self.score_proj is None or self.score_recency is None:
            return None
        wide = compute_dtype(x_BTD)
        place_BT1 = tokens.place_BT[..., None].to(wide) / PLACES
        recency_G = self.score_recency.to(wide)
        s_BTG = torch.addcmul(_wide_product(self.score_proj, x_BTD), place_BT1, recency_G)
        if self.lifetime_proj is None or self.lifetime_bias is None or self.recall_level is None:
            return s_BTG
        log_life_BTG = _wide_product(self.lifetime_proj, x_BTD) + self.lifetime_bias.to(wide)
        life_BTG = log_life_BTG.clamp(max=LONGEST).exp() / (1 + LATER * PLACES * place_BT1)
        return torch.maximum(s_BTG, self.recall_level.to(wide) + recency_G * life_BTG)

    def forward(
        self, x_BTD: Tensor, v_BTGV: Tensor, state: WindowState | KeptState | None, tokens: Tokens
    ) -> tuple[Tensor, Tensor, WindowState | KeptState | None]:
        """Means of values (B, T, H, V), logs of their normalisers (B, T, H), and the state after these tokens."""
        return self.attend(*self.queries_and_keys(x_BTD), v_BTGV, state, tokens, self.scores(x_BTD, tokens))

    def attend(
        self,
        q_BTHK: Tensor,
        k_BTGK: Tensor,
        v_BTGV: Tensor,
        state: WindowState | KeptState | None,
        tokens: Tokens,
        s_BTG: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, WindowState | KeptState | None]:
        """The same, given queries, keys and, with kept tokens, scores."""
        sink_query = far = None
        if self.rope:
            far = self._far(q_BTHK, tokens)
            if self.sinks:
                sink_query = self.rotary.turn_to(q_BTHK, tokens.place_BT.clamp(max=self.farthest))
            q_BTHK, k_BTGK = (self.rotary.turn(x, tokens) for x in (q_BTHK, k_BTGK))
        shared = {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks, "sink_query": sink_query}
        if s_BTG is not None:
            weights = (self.score_weight, self.received_weight)
            weight, received = (None if x is None else x.to(q_BTHK.dtype) for x in weights)
            kept = {"kept": self.kept, "weight": weight, "received": received, "far": far}
            return kept_attention(
                q_BTHK, k_BTGK, v_BTGV, s_BTG, left=self.size, **kept, **shared, state=state, tokens=tokens
            )
        right = self.size if self.config.bidirectional else 0
        return window_attention(
            q_BTHK, k_BTGK, v_BTGV, left=self.size, right=right, **shared, state=state, tokens=tokens
        )

    def _far(self, q_BTHK: Tensor, tokens: Tokens) -> Far | None:
        """How to look at kept tokens that are out of reach; None where none is, for these queries and the next."""
        if not self.kept or self.reach is None:
            return None
        if tokens.from_start:
            if tokens.length <= self.reach:
                return None
        elif not values_hidden(q_BTHK):
            following = tokens.shared("following", lambda: int(tokens.place_BT.max()) + 1)
            if following <= self.reach:
                return None
        place = torch.full((1, tokens.length), self.reach, device=q_BTHK.device)
        return Far(self.reach, self.rotary.turn_to(q_BTHK, place), self.rotary.turn_back)


def _wide_product(projection: Linear, x_BTD: Tensor) -> Tensor:
    """W x, without autocast and at least float32: narrow products could not tell many tokens apart."""
    kind = x_BTD.device.type
    plain = not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind)
    with nullcontext() if plain else torch.autocast(kind, enabled=False):
        return projection(x_BTD).to(compute_dtype(x_BTD))
