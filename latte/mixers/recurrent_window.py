"""R-SWA, the paper's ablation of Macchiato: a recurrence feeds the queries and keys of a plain sliding window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from latte.layers.config import MixerConfig
from latte.layers.feeds import Feed, build_feed
from latte.layers.linear import RMSNorm
from latte.layers.window import Window
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import WindowState
from latte.state import State, state
from latte.tokens import Tokens


@state
class RecurrentWindowState(State):
    feed: State | None
    window: WindowState


@register("r-swa")
class RecurrentWindowMixer(HeadMixer):
    """z = RMSNorm(RG-LRU(x)); queries and keys from z, values from x; softmax over t - w <= s <= t, equation (17)."""

    @dataclass(frozen=True)
    class Options:
        window: int = 128
        feed: Literal["x", "conv", "rglru"] = "rglru"
        conv_size: int = 3
        radius: Literal["base", "power"] = "base"
        rope: bool = False  # the recurrence carries position

    linear_in_values = normalised = True
    directions = ("causal", "bidirectional")
    examples = ({"window": 4}, {"window": 2, "feed": "conv", "rope": True}, {"window": 3, "bidirectional": True})
    presets = {"r-swa++": lambda size: {"mixer_options": {"window": size.window}}}  # noqa: RUF012
    published = {"r-swa++": (18.25, 141)}  # noqa: RUF012

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        options = self.options
        self.feed: Feed = build_feed(
            options.feed,
            config.hidden_size,
            blocks=config.num_heads,
            conv_size=options.conv_size,
            radius=options.radius,
            bidirectional=config.bidirectional,
        )
        self.feed_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.window = Window(config, options.window, rope=options.rope)

    def init_state(self, like_BTD: Tensor) -> RecurrentWindowState:
        return RecurrentWindowState(self.feed.init_state(like_BTD), self.window.init_state(like_BTD))

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        feed, window = (None, None) if state is None else (state.feed, state.window)
        z_BTD, feed = self.feed(x_BTD, feed, tokens)
        y_BTHV, _, window = self.window(self.feed_norm(z_BTD), v_BTGV, window, tokens)
        return y_BTHV, None if window is None else RecurrentWindowState(feed, window)
