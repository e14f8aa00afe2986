"""Gated attention behind a filter: Mega and CHELA."""

from __future__ import annotations

from typing import Any

import torch

from latte.decode.program import Builder, Rows
from latte.decode.stages.attention import ALL, RING, Attention, Sizes
from latte.decode.stages.parts import matrix, unit_length
from latte.decode.stages.registry import Out, stages_of
from latte.layers.linear import HeadNorm
from latte.mixers.mega import MovingAverage
from latte.models.engine import Mixing
from latte.ops import native

SILU = native.ACTIVATIONS["silu"]


def _project(b: Builder, mixer: Any, x: str) -> None:
    """Values "v" from x, and from the filtered input "m" the gates and what attention reads, "q" and "k"."""
    D, Z, V = mixer.config.hidden_size, mixer.keys, mixer.values
    b.product(x, D, (mixer, "v_proj", V, b.room("v", V)), act="silu", beside=True)
    b.split("m", D, mixer, "in_proj", u=Rows(D, "sigmoid"), z=Rows(Z, "silu"), r=Rows(V, "silu"), h=Rows(D))
    scale, shift = (b.weight(mixer, name, 2, Z).detach() for name in ("scale", "shift"))
    for i, y in enumerate("qk"):
        b.stage("Map", beside=y == "q", x="z", weight=scale[i], bias=shift[i], y=b.room(y, Z), width=Z)


def _gated_output(b: Builder, mixer: Any, x: str, out: Out) -> None:
    """u . (silu(h + W_h (r . a)) - x), with a in "mixed"."""
    D, V = mixer.config.hidden_size, mixer.values
    b.stage("Gate", x="mixed", gate="r", y="mixed", width=V)
    b.product("mixed", V, (mixer, "h_proj", D, "h"), added=True)
    b.stage("Map", x="h", y="h", width=D, act=SILU)
    minus = b.constant(torch.full((D,), -1.0, dtype=b.dtype, device="cpu"))
    b.stage("Gate", x=x, weight=minus, y="h", width=D, added=True)
    b.stage("Gate", x="h", gate="u", y=out.y, width=D, added=out.added)


@stages_of("mega")
def mega(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    D, N, Z, V, chunk = mixer.config.hidden_size, mixer.options.ema_size, mixer.keys, mixer.values, mixer.options.chunk
    average = b.child(mixer, "average", MovingAverage)
    weights: dict[str, Any] = {name: b.weight(average, name, D, N) for name in ("rate", "damping", "entry", "read")}
    weights |= {"skip": b.weight(mixer, "skip", D), "h": b.part("filter.h_BD")}
    b.stage("Average", x=x, y=b.room("m", D), width=D, size=N, **weights)
    b.stage("Map", x="m", y="m", width=D, act=SILU)
    _project(b, mixer, x)
    how: dict[str, Any] = {"sizes": Sizes(1, 1, Z, V)}
    if mixer.laplace:
        alpha, beta = b.weight(mixer, "bias", 2, Z).detach()
        how = {"sizes": Sizes(1, 1, 2 * Z, V), "behind": (alpha, beta), "scale": 1.0, "laplace": True}
    paths = tuple(f"attention.{path}" for path in (ALL if chunk is None else RING))
    window = None if chunk is None else chunk - 1
    attention = Attention(b, at, paths, mixer.rotary, window, chunked=chunk is not None, **how)
    attention.keep()
    attention.attend(b.room("mixed", V))
    _gated_output(b, mixer, x, out)


@stages_of("chela")
def chela(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    D, Z, V = mixer.config.hidden_size, mixer.keys, mixer.values
    short, long = mixer.options.short_size, mixer.options.long_size
    how: dict[str, Any] = {"y": b.room("m", D), "width": D, "channels": D}
    weight, tail = b.weight(mixer, "short_weight", 1, D, short), b.part("filter.short.tail_BKD")
    b.stage("Conv", x=x, weight=weight, taps=short, act=SILU, tail=tail, **how)
    weight, tail = b.weight(mixer, "long_weight", 1, D, long), b.part("filter.long.tail_BKD")
    near = b.weight(mixer, "near_weight", 1, D, short)
    b.stage("Conv", x="m", weight=weight, taps=long, near=near, near_taps=short, tail=tail, **how)
    _project(b, mixer, x)
    unit_length(b, "q", 1, Z)
    matrix(b, "attention.sum_BHKV", 1, Z, V)
    b.stage("Norm", x="mixed", y="mixed", width=V, groups=1, eps=b.child(mixer, "norm", HeadNorm).eps)
    _gated_output(b, mixer, x, out)
