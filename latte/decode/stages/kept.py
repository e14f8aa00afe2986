"""Tokens kept behind a window."""

from __future__ import annotations

from typing import Any

import torch

from latte.decode.program import Builder
from latte.decode.stages.attention import Attention
from latte.layers.window import LATER, LONGEST, PLACES
from latte.models.engine import Mixing, Unfit

#: Parts of the state that every token replaces, by the field of the stage.
PARTS = {
    "ring": "window.scores_BRG",
    "scores": "window.kept_scores_BNG",
    "places": "window.kept_places_BNG",
    "keys": "window.kept_keys_BNGK",
    "values": "window.kept_values_BNGV",
}


class KeptTokens:
    """What one layer keeps behind its window, as stages around the window's own."""

    def __init__(self, b: Builder, at: Mixing, x: str) -> None:
        mixer: Any = at.mixer
        self.b, self.config, self.window = b, mixer.config, mixer.window
        if self.window.received_weight is not None:
            raise Unfit("scores by attention received in the window have no stages")
        groups = self.config.kv_heads
        parts = [(self.window, "score_proj", groups, b.room("score", groups))]
        if self.window.lifetime_proj is not None:
            parts.append((self.window, "lifetime_proj", groups, b.room("life", groups)))
        b.product(x, self.config.hidden_size, *parts)

    def attend(self, attention: Attention, y: str, log_norm: str) -> None:
        """Look at the slots behind what the window gave, then let the token that leaves it take one."""
        b, window, G, K = self.b, self.window, self.config.kv_heads, self.config.width
        how: dict[str, Any] = {field: b.part(path) for field, path in PARTS.items()}
        how |= {"recency": b.weight(window, "score_recency", G), "weight": b.weight(window, "score_weight", G)}
        how |= {"score": "score", "unit": float(PLACES), "longest": LONGEST, "later": LATER}
        if window.lifetime_proj is not None:
            how |= {"life": "life", "life_bias": b.weight(window, "lifetime_bias", G)}
            how |= {"level": b.weight(window, "recall_level", G)}
        if window.rope and window.reach is not None:
            rotary = window.rotary
            speeds = b.constant(torch.tensor(rotary.frequencies, dtype=torch.float64, device="cpu"))
            # Places behind the reach count as it: a query that sees a token out of reach stands there.
            how |= {"far_angles": b.angles(rotary, nearest=window.reach), "speeds": speeds}
            how |= {"reach": window.reach, "rounded": rotary.rounded_below}
        sizes = {"heads": self.config.num_heads, "kept": window.kept, "window": window.size, "sinks": window.sinks}
        b.stage("Hold", q="q", y=y, log_norm=log_norm, **sizes, **attention.shared(), **how)
        b.work += 2 * sizes["heads"] * window.kept * K
