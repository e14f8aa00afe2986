"""RWKV-4, 6 and 7, and their channel mixing."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from latte.decode.program import Builder, Rows
from latte.decode.stages.parts import gated_output, group_norm, low_rank, matrix, shift, unit_length
from latte.decode.stages.registry import Out, stages_of
from latte.mixers import rwkv6 as six
from latte.mixers import rwkv7 as seven
from latte.models.engine import Mixing

#: Values of the first layer, which later layers of RWKV-7 read.
FIRST_VALUES = "first values"


@stages_of("rwkv4")
def rwkv4(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    D, before = mixer.config.hidden_size, shift(b, x, mixer.config.hidden_size, "shift.tail_BKD")
    for name, y, act in (("k", "k", "identity"), ("v", "v", "identity"), ("r", "gate", "sigmoid")):
        b.stage("Lerp", x=before, to=x, weight=b.weight(mixer, f"mu_{name}", D), y=b.room("blend", D), width=D)
        b.product("blend", D, (mixer, f"{name}_proj", D, b.room(y, D)), act=act)
    weights: dict[str, Any] = {"decay": b.weight(mixer, "time_decay", D), "first": b.weight(mixer, "time_first", D)}
    parts: dict[str, Any] = {"log_norm": b.part("wkv.log_norm_BD"), "mean": b.part("wkv.mean_BD")}
    b.stage("Wkv", k="k", v="v", y=b.room("mixed", D), width=D, **weights, **parts)
    gated_output(b, mixer, D, out)


@stages_of("rwkv4-channel")
def rwkv4_channel(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    D, inside = mixer.config.hidden_size, mixer.config.inner_width
    before = shift(b, x, D, "tail_BKD")
    for name, width, y, act in (("k", inside, "wide", "squared_relu"), ("r", D, "gate", "sigmoid")):
        b.stage("Lerp", x=before, to=x, weight=b.weight(mixer, f"mu_{name}", D), y=b.room("blend", D), width=D)
        b.product("blend", D, (mixer, f"{name}_proj", width, b.room(y, width)), act=act)
    b.product("wide", inside, (mixer, "v_proj", D, b.room("mixed", D)))
    b.stage("Gate", x="mixed", gate="gate", y=out.y, width=D, added=out.added)


@stages_of("rwkv7-channel")
def rwkv7_channel(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    D, inside = mixer.config.hidden_size, mixer.config.inner_width
    before = shift(b, x, D, "tail_BKD")
    b.stage("Lerp", x=x, to=before, weight=b.weight(mixer, "mu", D), y=b.room("blend", D), width=D)
    b.product("blend", D, (mixer, "k_proj", inside, b.room("wide", inside)), act="squared_relu")
    b.product("wide", inside, (mixer, "v_proj", D, out.y), added=out.added)


@stages_of("rwkv6")
def rwkv6(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    D, H, K, rank = mixer.config.hidden_size, mixer.num_heads, mixer.config.width, mixer.options.blend_rank
    before, mus = shift(b, x, D, "shift.tail_BKD"), b.child(mixer, "mu", nn.ParameterDict)
    b.stage("Lerp", x=x, to=before, weight=b.weight(mixer, "mu_x", D), y=b.room("blend", D), width=D)
    b.split("blend", D, mixer, "mix_down", **{f"low {name}": Rows(rank, "tanh") for name in six.BLENDS})
    ups = b.weight(mixer, "mix_up", len(six.BLENDS), rank, D).detach()
    for name, up in zip(six.BLENDS, ups, strict=True):
        b.stage("Blocks", x=f"low {name}", y=b.room("share", D), weight=up, blocks=1, inputs=rank, outputs=D, across=1)
        mu, y = b.weight(mus, name, D), b.room(f"blend {name}", D)
        b.stage("Lerp", x=x, to=before, share="share", weight=mu, y=y, width=D)
    for name, y, act in (("r", "q", "identity"), ("k", "k", "identity"), ("v", "v", "identity"), ("g", "gate", "silu")):
        b.product(f"blend {name}", D, (mixer, f"{name}_proj", D, b.room(y, D)), act=act, beside=True)
    bias = b.weight(mixer, "time_decay", D)
    low_rank(b, mixer, "decay_proj", "blend w", "decay", D, act="negative_exp", bias=bias)
    matrix(b, "memory.sum_BHKV", H, K, K, g="decay", earlier=True)
    _bonus(b, b.weight(mixer, "bonus", D), "mixed", H, K)
    _head_norm(b, mixer, H, K)
    gated_output(b, mixer, D, out)


@stages_of("rwkv7")
def rwkv7(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    D, H, K, mus = mixer.config.hidden_size, mixer.num_heads, mixer.config.width, b.child(mixer, "mu", nn.ParameterDict)
    before, first = shift(b, x, D, "shift.tail_BKD"), not b.has_room(FIRST_VALUES)
    for name in seven.BLENDS:
        mu, y = b.weight(mus, name, D), b.room(f"blend {name}", D)
        b.stage("Lerp", beside=name != "g", x=x, to=before, weight=mu, y=y, width=D)
    v = FIRST_VALUES if first else "v"
    for name, y in (("r", "q"), ("k", "k"), ("v", v)):
        b.product(f"blend {name}", D, (mixer, f"{name}_proj", D, b.room(y, D)), beside=True)
    low_rank(b, mixer, "gate_proj", "blend g", "gate", D)
    low_rank(b, mixer, "rate_proj", "blend a", "rate", D, act="sigmoid", bias=b.weight(mixer, "a_0", D))
    low_rank(b, mixer, "decay_proj", "blend w", "decay", D, act="sigmoid", bias=b.weight(mixer, "w_0", D))
    if not first:
        low_rank(b, mixer, "value_proj", "blend v", "share", D, act="sigmoid", bias=b.weight(mixer, "v_0", D))
        b.stage("Lerp", x="v", to=FIRST_VALUES, share="share", y="v", width=D)
    b.stage("Gate", x="k", weight=b.weight(mixer, "k_k", D), y=b.room("read", D), width=D)
    unit_length(b, "read", H, K, 1e-12)
    b.stage("Gate", x="read", gate="rate", y=b.room("erased", D), width=D)
    b.stage("Gate", x="k", gate="rate", y="rate", width=D)
    b.stage("Lerp", x="k", to="rate", weight=b.weight(mixer, "k_a", D), y="k", width=D)
    scale = -math.exp(-0.5)
    matrix(b, "memory.map_BHKV", H, K, K, v=v, g="decay", decay_scale=scale, a="read", b="erased")
    _head_norm(b, mixer, H, K)
    _bonus(b, b.weight(mixer, "r_k", D), "mixed", H, K, v)
    gated_output(b, mixer, D, out)


def _bonus(b: Builder, weight: Any, y: str, heads: int, width: int, v: str = "v") -> None:
    b.stage("Bonus", q="q", k="k", v=v, y=y, weight=weight, heads=heads, key_width=width, value_width=width)


def _head_norm(b: Builder, mixer: Any, heads: int, width: int) -> None:
    norm = b.child(mixer, "norm", six.ScaledHeadNorm)
    eps = b.child(norm, "heads", six.CentredHeadNorm).eps
    bias = b.weight(norm, "bias", heads * width)
    group_norm(b, norm, "mixed", heads, width, eps, bias=bias, centred=True)
