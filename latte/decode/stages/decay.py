"""Linear attention with a state that fades: GLA, RetNet and Lightning."""

from __future__ import annotations

from typing import Any

import torch

from latte.decode.program import Builder
from latte.decode.stages.registry import Out, stages_of
from latte.models.engine import Mixing, Unfit


def _project(b: Builder, mixer: Any, x: str, widths: dict[str, int], act: str = "identity") -> None:
    """Queries, keys and values in activations of these names, each beside the next."""
    for name, width in widths.items():
        b.product(
            x, mixer.config.hidden_size, (mixer, f"{name}_proj", width, b.room(name, width)), act=act, beside=True
        )


def _head_norm(b: Builder, mixer: Any, width: int) -> None:
    """Each head of "mixed" by itself, without parameters."""
    fields: dict[str, Any] = {"width": width, "groups": mixer.config.num_heads, "eps": mixer.config.norm_eps}
    b.stage("Norm", x="mixed", y="mixed", **fields)


def _finish(b: Builder, mixer: Any, width: int, out: Out) -> None:
    """W_o of "mixed" times "gate"."""
    b.stage("Gate", x="mixed", gate="gate", width=width)
    b.product("mixed", width, (mixer, "o_proj", mixer.config.hidden_size, out.y), added=out.added)


@stages_of("gla")
def gla(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    H, K, V, D = mixer.config.num_heads, mixer.key_width, mixer.value_width, mixer.config.hidden_size
    low, rank = b.child(mixer, "decay_proj", torch.nn.Sequential), mixer.options.gate_rank
    _project(b, mixer, x, {"q": H * K, "k": H * K, "v": H * V})
    b.product(x, D, (low, "0", rank, b.room("low", rank)))
    b.product(x, D, (mixer, "gate_proj", H * V, b.room("gate", H * V)), act="silu", beside=True)
    b.product("low", rank, (low, "1", H * K, b.room("decay", H * K)), act="logsigmoid")
    sizes: dict[str, Any] = {"heads": H, "key_width": K, "value_width": V, "sum": b.part("sum_BHKV")}
    scales: dict[str, Any] = {
        "query_scale": K**-0.5,
        "key_scale": 1.0,
        "decay_scale": 1 / mixer.options.gate_temperature,
    }
    b.stage("Decay", q="q", k="k", v="v", g="decay", y=b.room("mixed", H * V), **sizes, **scales)
    _head_norm(b, mixer, V)
    _finish(b, mixer, H * V, out)


@stages_of("retnet")
def retnet(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    H, K, V, D = mixer.config.num_heads, mixer.config.width, mixer.value_width, mixer.config.hidden_size
    _project(b, mixer, x, {"q": H * K, "k": H * K, "v": H * V})
    b.product(x, D, (mixer, "gate_proj", H * V, b.room("gate", H * V)), act="silu")
    angles = b.angles(mixer.rotary)
    b.stage("Turn", beside=True, x="q", angles=angles, heads=H, width=K)
    b.stage("Turn", x="k", angles=angles, heads=H, width=K)
    heads = torch.arange(H, dtype=b.dtype, device="cpu")
    decay = b.constant(torch.log1p(-torch.exp2(-5 - heads)))
    _decay_by_head(b, mixer, decay, K, V, key_scale=K**-0.5)
    _head_norm(b, mixer, V)
    _finish(b, mixer, H * V, out)


@stages_of("lightning")
def lightning(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    H, V, D = mixer.config.num_heads, mixer.config.width, mixer.config.hidden_size
    _project(b, mixer, x, dict.fromkeys("qkv", H * V), act="silu")
    gate = b.child(mixer, "gate_proj")
    if isinstance(gate, torch.nn.Sequential):
        rank = b.child(gate, "0").out_features
        b.product(x, D, (gate, "0", rank, b.room("low", rank)))
        b.product("low", rank, (gate, "1", H * V, b.room("gate", H * V)), act="sigmoid")
    else:
        b.product(x, D, (mixer, "gate_proj", H * V, b.room("gate", H * V)), act="sigmoid")
    like = torch.empty(0, dtype=b.dtype, device="cpu")
    _decay_by_head(b, mixer, b.constant(mixer.log_decay(like)), V, V)
    norm = b.child(mixer, "norm")
    if b.anatomy.norm(norm).eps != mixer.config.norm_eps:
        raise Unfit("the norm of mixer 'lightning' has another constant")
    b.norm(norm, "mixed", "mixed", H * V)
    _finish(b, mixer, H * V, out)


def _decay_by_head(b: Builder, mixer: Any, decay: torch.Tensor, K: int, V: int, key_scale: float = 1.0) -> None:
    sizes: dict[str, Any] = {"heads": mixer.config.num_heads, "key_width": K, "value_width": V}
    scales: dict[str, Any] = {"query_scale": 1.0, "key_scale": key_scale}
    y = b.room("mixed", sizes["heads"] * V)
    b.stage("Decay", q="q", k="k", v="v", y=y, decay=decay, sum=b.part("sum_BHKV"), **sizes, **scales)
