"""What feeds latents, and the windows of R-SWA."""

from __future__ import annotations

from typing import Any

from latte.decode.program import Builder
from latte.decode.stages.parts import rglru
from latte.layers.feeds import RGLRU, ConvFeed, Feed


def feed(b: Builder, mixer: Any, x: str) -> str:
    """The activation that the mixer's feed makes of x; runs beside what comes next."""
    D, module = mixer.config.hidden_size, b.child(mixer, "feed", Feed, ConvFeed, RGLRU)
    if type(module) is RGLRU:
        rglru(b, module, x, "fed", "feed.h_BD", beside=True)
        return "fed"
    if type(module) is ConvFeed:
        how: dict[str, Any] = {"width": D, "taps": module.size, "channels": D, "tail": b.part("feed.tail_BKD")}
        b.stage("Conv", beside=True, x=x, y=b.room("fed", D), weight=b.weight(module, "weight", D, module.size), **how)
        return "fed"
    return x
