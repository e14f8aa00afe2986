"""Diagonal state-space models of constant pace: S4D, S5, H3, and SWH with its window."""

from __future__ import annotations

from typing import Any

from latte.decode.program import Builder, Rows
from latte.decode.stages.attention import RING, Attention, queries_keys_values
from latte.decode.stages.registry import Out, stages_of
from latte.layers.diagonal import SLOWEST
from latte.mixers.s5 import SLOWEST as SLOWEST_MODE
from latte.mixers.swh import LARGEST_LOG_RATE
from latte.models.engine import Mixing
from latte.ops import native


def _held(b: Builder, mixer: Any, x: str, y: str, state: str, read: Any) -> None:
    """y = S(x) + skip . x, discretised by zero-order hold with its bounds."""
    D, N = mixer.frequency.shape
    weights: dict[str, Any] = {name: b.weight(mixer, name, D, N) for name in ("log_rate", "frequency")}
    weights |= {name: b.weight(mixer, name, D) for name in ("log_step", "skip")}
    how: dict[str, Any] = {"width": D, "size": N, "slowest": SLOWEST, "most": 40.0, "longest": 10.0}
    b.stage("StateSpace", x=x, y=b.room(y, D), read=read, h=b.part(state), **weights, **how)


@stages_of("s4d")
def s4d(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    D, N = mixer.frequency.shape
    _held(b, mixer, x, "mixed", "h_BPZ", b.weight(mixer, "out_weight", 1, D, N, 2))
    b.stage("Map", x="mixed", y="mixed", width=D, act=native.ACTIVATIONS["gelu"])
    b.split("mixed", D, mixer, "out_proj", value=Rows(D), gate=Rows(D, "sigmoid"))
    b.stage("Gate", x="value", gate="gate", y=out.y, width=D, added=out.added)


@stages_of("s5")
def s5(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    D, P, kind = mixer.config.hidden_size, mixer.options.state_size // 2, mixer.options.activation
    weights: dict[str, Any] = {name: b.weight(mixer, name, P) for name in ("log_rate", "frequency", "log_step")}
    weights["in"] = b.weight(mixer, "in_weight", P, D, 2)
    how: dict[str, Any] = {"width": D, "size": P, "slowest": SLOWEST_MODE, "h": b.part("h_BPZ")}
    b.stage("Modes", x=x, y=b.room("modes", 2 * P), **weights, **how)
    y, added = (out.y, out.added) if kind == "none" else (b.room("mixed", D), False)
    b.work += 4 * P * D
    b.stage("Product", x="modes", width=2 * P, w0=b.weight(mixer, "out_weight", D, P, 2), rows0=D, y0=y, added=added)
    b.stage("Gate", x=x, weight=b.weight(mixer, "skip", D), y=y, width=D, added=True)
    if kind == "none":
        return
    b.stage("Map", x="mixed", y=b.room("act", D), width=D, act=native.ACTIVATIONS["gelu_tanh"])
    b.product("act", D, (mixer, "gate_proj", D, b.room("gate", D)), act="sigmoid")
    value = "act" if kind == "half_glu1" else "mixed"
    b.stage("Gate", x=value, gate="gate", y=out.y, width=D, added=out.added)


@stages_of("h3")
def h3(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    (D, N), taps = mixer.frequency.shape, mixer.options.shift_size
    b.product(x, D, *((mixer, f"{name}_proj", D, b.room(name, D)) for name in "qkv"))
    how: dict[str, Any] = {"width": D, "taps": taps, "channels": D, "tail": b.part("shift.tail_BKD")}
    b.stage("Conv", x="k", y=b.room("z", D), weight=b.weight(mixer, "shift_weight", D, taps), **how)
    b.stage("Gate", x="k", weight=b.weight(mixer, "shift_skip", D), y="z", width=D, added=True)
    b.stage("Gate", x="z", gate="v", y="z", width=D)
    _held(b, mixer, "z", "mixed", "diagonal.h_BPZ", b.weight(mixer, "out_weight", D, N, 2))
    b.stage("Gate", x="mixed", gate="q", y="mixed", width=D)
    b.product("mixed", D, (mixer, "o_proj", D, out.y), added=out.added)


@stages_of("swh")
def swh(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    D, width, window = mixer.config.hidden_size, mixer.config.num_heads * mixer.config.width, mixer.window
    b.product(x, D, (mixer, "in_proj", D, b.room("wave", D)))
    weights: dict[str, Any] = {name: b.weight(mixer, name, D) for name in ("log_rate", "frequency")}
    # The module leaves room for rounding above the largest rate.
    how: dict[str, Any] = {"width": D, "size": 1, "most": LARGEST_LOG_RATE + 1, "h": b.part("spectral.h_BPZ")}
    b.stage("StateSpace", x="wave", y="wave", **weights, **how)
    b.norm(b.child(mixer, "norm"), "wave", "wave", D)
    queries_keys_values(b, at, x)
    rotary = window.rotary if window.rope else None
    paths = tuple(f"window.{path}" for path in RING)
    attention = Attention(b, at, paths, rotary, window.size, window.sinks, window.scale, window.softcap)
    attention.keep()
    attention.attend(b.room("seen", width))
    b.product("seen", width, (mixer, "local_proj", D, "wave"), added=True)
    b.product("wave", D, (mixer, "o_proj", D, out.y), added=out.added)
