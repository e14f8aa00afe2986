"""R-SWA, the paper's ablation of Macchiato: a recurrence feeds the queries and keys of a plain sliding window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from latte.mixers.base import Mixer, MixerConfig, register
from latte.mixers.feeds import Feed, build_feed
from latte.mixers.layers import Linear, RMSNorm, split_heads
from latte.mixers.window import Window
from latte.ops import WindowState
from latte.state import State, require_state, state


@state
class RecurrentWindowState(State):
    feed: State | None
    window: WindowState


@register("r-swa")
class RecurrentWindowMixer(Mixer):
    """z = RMSNorm(RG-LRU(x)); queries and keys from z, values from x; softmax over t - w <= s <= t, equation (17)."""

    @dataclass(frozen=True)
    class Options:
        window: int = 128
        feed: Literal["x", "conv", "rglru"] = "rglru"
        conv_size: int = 3
        radius: Literal["base", "power"] = "base"
        rope: bool = False  # the recurrence carries position

    normalised = True
    directions = ("causal", "bidirectional")
    examples = ({"window": 4}, {"window": 2, "feed": "conv", "rope": True}, {"window": 3, "bidirectional": True})

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
        self.v_proj = Linear(config.hidden_size, config.kv_heads * config.width)
        self.o_proj = Linear(config.num_heads * config.width, config.hidden_size, residual=True)

    def values(self, x_BTD: Tensor) -> Tensor:
        return split_heads(self.v_proj(x_BTD), self.config.kv_heads)

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.o_proj(y_BTHV.flatten(2))

    def init_state(self, like_BTD: Tensor) -> RecurrentWindowState:
        return RecurrentWindowState(self.feed.init_state(like_BTD), self.window.init_state(like_BTD))

    def mix(
        self,
        x_BTD: Tensor,
        values_BTGV: Tensor | None,
        state: State | None,
        mask: Tensor | None,
        reset: Tensor | None,
    ) -> tuple[Tensor, State | None]:
        before = None if state is None else require_state("mixer 'r-swa'", state, self.init_state(x_BTD))
        v_BTGV = self.values(x_BTD) if values_BTGV is None else values_BTGV
        fed_BTD, feed_state = self.feed(x_BTD, before and before.feed, mask, reset)
        y_BTHV, _, window_state = self.window(self.feed_norm(fed_BTD), v_BTGV, before and before.window, mask, reset)
        if self.config.bidirectional:
            return y_BTHV, None
        return y_BTHV, RecurrentWindowState(feed_state, window_state)
