"""Stages that many mixers share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from latte.decode.program import Builder
from latte.decode.stages.registry import Out
from latte.layers.feeds import GATE_POWER, RGLRU
from latte.layers.linear import LowRank
from latte.models.engine import Unfit
from latte.ops import native

BETWEEN = {None: "identity", torch.tanh: "tanh", torch.sigmoid: "sigmoid"}


def project(b: Builder, mixer: Any, x: str, widths: dict[str, int], act: str = "identity") -> None:
    """Projections called ``{name}_proj`` in activations of these names, each beside the next."""
    for name, width in widths.items():
        part = (mixer, f"{name}_proj", width, b.room(name, width))
        b.product(x, mixer.config.hidden_size, part, act=act, beside=True)


def low_rank(b: Builder, mixer: Any, name: str, x: str, y: str, width: int, **how: Any) -> None:
    """A projection of low rank to an activation of so many numbers; ``how``: what the last product is given."""
    pair = b.child(mixer, name, LowRank)
    if pair.activation not in BETWEEN:
        raise Unfit(f"{name} of mixer {mixer.name!r} has an unknown activation")
    rank = pair.down.out_features
    b.product(x, mixer.config.hidden_size, (pair, "down", rank, b.room(f"low {y}", rank)), act=BETWEEN[pair.activation])
    b.product(f"low {y}", rank, (pair, "up", width, b.room(y, width)), **how)


def convolve(b: Builder, mixer: Any, tail: str, widths: dict[str, int], act: str = "identity") -> None:
    """The mixer's convolution over the channels of these activations, one behind the other, each in place."""
    channels, taps, first = sum(widths.values()), mixer.options.conv_size, 0
    weight = b.weight(mixer, "conv_weight", channels, taps).detach()
    bias = b.weight(mixer, "conv_bias", channels).detach() if "conv_bias" in mixer._parameters else None
    how: dict[str, Any] = {"taps": taps, "act": native.ACTIVATIONS[act], "channels": channels, "tail": b.part(tail)}
    for name, width in widths.items():
        own: dict[str, Any] = {"weight": weight[first:], "bias": None if bias is None else bias[first:]}
        b.stage("Conv", beside=name != [*widths][-1], x=name, y=name, width=width, first=first, **own, **how)
        first += width


def shift(b: Builder, x: str, width: int, tail: str) -> str:
    """The token before: a convolution that sees it alone."""
    taps = b.constant(torch.tensor([1.0, 0.0], dtype=b.dtype, device="cpu").repeat(width, 1))
    how: dict[str, Any] = {"width": width, "taps": 2, "channels": width, "tail": b.part(tail)}
    b.stage("Conv", x=x, y=b.room("before", width), weight=taps, **how)
    return "before"


def rglru(b: Builder, feed: RGLRU, x: str, y: str, state: str, beside: bool = False) -> None:
    _, heads, width = feed.gate_bias.shape
    weights: dict[str, Any] = {
        "weight": b.weight(feed, "gate_weight", 2, heads, width, width),
        "bias": b.weight(feed, "gate_bias", 2, heads, width),
        "decay": b.weight(feed, "decay", heads * width),
    }
    how: dict[str, Any] = {"heads": heads, "width": width, "power": GATE_POWER, "h": b.part(state)}
    b.stage("Rglru", beside=beside, x=x, y=b.room(y, heads * width), **weights, **how)


def matrix(
    b: Builder, state: str, heads: int, key_width: int, value_width: int, y: str = "mixed", /, **how: Any
) -> None:
    """A matrix for each head, from "q", "k" and "v" to ``y``; ``how``: other fields of the stage Matrix."""
    fields: dict[str, Any] = {"q": "q", "k": "k", "v": "v", **dict.fromkeys(("q_heads", "k_heads", "v_heads"), heads)}
    fields |= {"decays": key_width, **dict.fromkeys(("query_scale", "key_scale", "decay_scale"), 1.0)}
    sizes: dict[str, Any] = {"heads": heads, "key_width": key_width, "value_width": value_width}
    sizes["state"] = b.part(state, how.get("blocks", 0))
    b.stage("Matrix", y=b.room(y, heads * value_width), **sizes, **(fields | how))


def levels(b: Builder, mixer: Any, x: str) -> dict[str, Any]:
    """Fields of the stage Matrix for a memory in blocks of doubling size: the weights by which they are read."""
    blocks, width = mixer.options.max_levels, mixer.level_heads * mixer.options.max_levels
    b.product(x, mixer.config.hidden_size, (mixer, "level_proj", width, b.room("levels", width)))
    b.stage("Gate", x="levels", weight=b.weight(mixer, "level_scale", width), y="levels", width=width)
    b.stage("Map", x="levels", y="levels", width=width, act=native.ACTIVATIONS["softplus"])
    return {"levels": "levels", "blocks": blocks}


def turn(b: Builder, mixer: Any, width: int) -> None:
    """Queries and keys by the token's place."""
    how: dict[str, Any] = {"angles": b.angles(mixer.rotary), "heads": mixer.config.num_heads}
    for name in ("q", "k"):
        b.stage("Turn", beside=name == "q", x=name, width=width, turned=width, **how)


def unit_length(b: Builder, x: str, heads: int, width: int, eps: float = 1e-6) -> None:
    """Heads of an activation at length 1: an RMS norm, over the square root of their width."""
    weight = b.constant(torch.full((width,), width**-0.5, dtype=b.dtype, device="cpu"))
    b.stage("Norm", x=x, y=x, weight=weight, width=width, groups=heads, eps=eps / width)


def group_norm(b: Builder, norm: nn.Module, x: str, groups: int, width: int, eps: float, **how: Any) -> None:
    """Each group of channels by itself, with weights of its own."""
    weight: Tensor = b.weight(norm, "weight", groups * width)
    b.stage("Norm", x=x, y=x, weight=weight, own=True, width=width, groups=groups, eps=eps, **how)


def gated_output(b: Builder, mixer: Any, width: int, out: Out, name: str = "o_proj") -> None:
    """W_o of "mixed" times "gate"."""
    b.stage("Gate", x="mixed", gate="gate", y="mixed", width=width)
    b.product("mixed", width, (mixer, name, mixer.config.hidden_size, out.y), added=out.added)
