"""Recurrences and windows: Griffin's two layers, and R-SWA."""

from __future__ import annotations

from typing import Any

from latte.decode.program import Builder
from latte.decode.stages.attention import RING, Attention, queries_keys_values
from latte.decode.stages.feeds import feed
from latte.decode.stages.parts import convolve, gated_output, rglru
from latte.decode.stages.registry import Out, stages_of
from latte.layers.feeds import RGLRU
from latte.models.engine import Mixing


@stages_of("griffin")
def griffin(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    W, D = mixer.width, mixer.config.hidden_size
    b.product(x, D, (mixer, "y_proj", W, b.room("gate", W)), act="gelu_tanh", beside=True)
    b.product(x, D, (mixer, "x_proj", W, b.room("x", W)))
    convolve(b, mixer, "conv.tail_BKD", {"x": W})
    rglru(b, b.child(mixer, "lru", RGLRU), "x", "mixed", "lru.h_BD")
    gated_output(b, mixer, W, out, "out_proj")


@stages_of("local-attention")
def local_attention(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    H, G, K, D = mixer.config.num_heads, mixer.config.kv_heads, mixer.config.width, mixer.config.hidden_size
    queries_keys_values(b, at, x)
    how: dict[str, Any] = {"angles": b.angles(mixer.rotary), "width": K, "turned": K // 2}
    b.stage("Turn", beside=True, x="q", heads=H, **how)
    b.stage("Turn", x="k", heads=G, **how)
    attention = Attention(b, at, RING, None, mixer.options.window)
    attention.keep()
    attention.attend(b.room("seen", H * K))
    bias = b.weight(mixer, "out_bias", D)
    b.product("seen", H * K, (mixer, "o_proj", D, out.y), added=out.added, bias=bias)


@stages_of("r-swa")
def recurrent_window(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    config, window = mixer.config, mixer.window
    H, G, K, D = config.num_heads, config.kv_heads, config.width, config.hidden_size
    fed = feed(b, mixer, x)
    b.product(x, D, (mixer, "v_proj", G * K, b.room("v", G * K)))
    b.norm(b.child(mixer, "feed_norm"), fed, b.room("fed", D), D)
    b.product("fed", D, (window, "q_proj", H * K, b.room("q", H * K)), (window, "k_proj", G * K, b.room("k", G * K)))
    paths = tuple(f"window.{path}" for path in RING)
    rotary = window.rotary if window.rope else None
    attention = Attention(b, at, paths, rotary, window.size, window.sinks, window.scale, window.softcap)
    attention.keep()
    attention.attend(b.room("seen", H * K))
    b.product("seen", H * K, (mixer, "o_proj", D, out.y), added=out.added)
