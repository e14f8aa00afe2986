"""Linear attention, and with states that fade: GLA, RetNet, Lightning, InLine, QT, higher orders, free energies."""

from __future__ import annotations

from typing import Any

import torch

from latte.decode.program import Builder, Rows
from latte.decode.stages.attention import ALL, Attention, Sizes
from latte.decode.stages.parts import gated_output, matrix, project, turn, unit_length
from latte.decode.stages.registry import Out, stages_of
from latte.mixers import fem
from latte.mixers.qt import FLOOR
from latte.models.engine import Mixing, Unfit


def _head_norm(b: Builder, mixer: Any, width: int) -> None:
    """Each head of "mixed" by itself, without parameters."""
    fields: dict[str, Any] = {"width": width, "groups": mixer.config.num_heads, "eps": mixer.config.norm_eps}
    b.stage("Norm", x="mixed", y="mixed", **fields)


@stages_of("gla")
def gla(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    H, K, V, D = mixer.config.num_heads, mixer.key_width, mixer.value_width, mixer.config.hidden_size
    low, rank = b.child(mixer, "decay_proj", torch.nn.Sequential), mixer.options.gate_rank
    project(b, mixer, x, {"q": H * K, "k": H * K, "v": H * V})
    b.product(x, D, (low, "0", rank, b.room("low", rank)))
    b.product(x, D, (mixer, "gate_proj", H * V, b.room("gate", H * V)), act="silu", beside=True)
    b.product("low", rank, (low, "1", H * K, b.room("decay", H * K)), act="logsigmoid")
    temperature = mixer.options.gate_temperature
    matrix(b, "sum_BHKV", H, K, V, g="decay", query_scale=K**-0.5, decay_scale=1 / temperature)
    _head_norm(b, mixer, V)
    gated_output(b, mixer, H * V, out)


@stages_of("retnet")
def retnet(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    H, K, V, D = mixer.config.num_heads, mixer.config.width, mixer.value_width, mixer.config.hidden_size
    project(b, mixer, x, {"q": H * K, "k": H * K, "v": H * V})
    b.product(x, D, (mixer, "gate_proj", H * V, b.room("gate", H * V)), act="silu")
    turn(b, mixer, K)
    heads = torch.arange(H, dtype=b.dtype, device="cpu")
    decay = b.constant(torch.log1p(-torch.exp2(-5 - heads)))
    matrix(b, "sum_BHKV", H, K, V, decay=decay, key_scale=K**-0.5)
    _head_norm(b, mixer, V)
    gated_output(b, mixer, H * V, out)


@stages_of("lightning")
def lightning(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    H, V, D = mixer.config.num_heads, mixer.config.width, mixer.config.hidden_size
    project(b, mixer, x, dict.fromkeys("qkv", H * V), act="silu")
    gate = b.child(mixer, "gate_proj")
    if isinstance(gate, torch.nn.Sequential):
        rank = b.child(gate, "0").out_features
        b.product(x, D, (gate, "0", rank, b.room("low", rank)))
        b.product("low", rank, (gate, "1", H * V, b.room("gate", H * V)), act="sigmoid")
    else:
        b.product(x, D, (mixer, "gate_proj", H * V, b.room("gate", H * V)), act="sigmoid")
    like = torch.empty(0, dtype=b.dtype, device="cpu")
    matrix(b, "sum_BHKV", H, V, V, decay=b.constant(mixer.log_decay(like)))
    norm = b.child(mixer, "norm")
    if b.anatomy.norm(norm).eps != mixer.config.norm_eps:
        raise Unfit("the norm of mixer 'lightning' has another constant")
    b.norm(norm, "mixed", "mixed", H * V)
    gated_output(b, mixer, H * V, out)


#: Numbers of the features in the stage Features.
FEATURES = {"elu": 0, "hedgehog": 1, "based": 2, "relu": 3, "share": 4, "fast": 5, "unit": 6}


def _queries_keys_values(b: Builder, mixer: Any, x: str, key_width: int) -> None:
    """Activations "q", "k" and "v", the last two of fewer heads."""
    config = mixer.config
    H, G, V = config.num_heads, config.kv_heads, config.width
    parts = (("q", H * key_width), ("k", G * key_width), ("v", G * V))
    projections = ((mixer, f"{name}_proj", width, b.room(name, width)) for name, width in parts)
    b.product(x, config.hidden_size, *projections)


@stages_of("linear")
def linear(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    config, K, F = mixer.config, mixer.key_width, mixer.feature_width
    H, G, V, D = config.num_heads, config.kv_heads, config.width, config.hidden_size
    _queries_keys_values(b, mixer, x, K)
    for name, heads in (("q", H), ("k", G)):
        kind, source = mixer.options.features, name
        if kind == "hedgehog":
            how: dict[str, Any] = {"blocks": heads, "inputs": K, "outputs": K}
            source = b.room("mapped", heads * K)
            b.stage("Blocks", x=name, y=source, weight=b.weight(mixer, f"{name}_map", heads, K, K), **how)
        y = b.room(f"{name} features", heads * F)
        sizes: dict[str, Any] = {"heads": heads, "groups": heads, "width": K}
        b.stage("Features", x=source, y=y, kind=FEATURES[kind], floor=mixer.options.floor, **sizes)
    matrix(b, "sum_BHKV", H, F, V, q="q features", k="k features", k_heads=G, v_heads=G, mean=True)
    b.product("mixed", H * V, (mixer, "o_proj", D, out.y), added=out.added)


@stages_of("inline")
def inline(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    H, G, K, D = mixer.config.num_heads, mixer.config.kv_heads, mixer.config.width, mixer.config.hidden_size
    _queries_keys_values(b, mixer, x, K)
    if mixer.options.features == "relu":
        for name, heads in (("q", H), ("k", G)):
            how: dict[str, Any] = {"heads": heads, "groups": heads, "width": K}
            b.stage("Features", beside=name == "q", x=name, y=name, kind=FEATURES["relu"], **how)
    matrix(b, "sum_BHKV", H, K, K, k_heads=G, v_heads=G, shift=True, query_scale=K**-0.5)
    b.product("mixed", H * K, (mixer, "o_proj", D, out.y), added=out.added)


@stages_of("qt")
def qt(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    H, G, V, D = mixer.config.num_heads, mixer.config.kv_heads, mixer.config.width, mixer.config.hidden_size
    kind, F = mixer.options.features, mixer.feature_width
    _queries_keys_values(b, mixer, x, mixer.key_width)
    how: dict[str, Any] = {"kind": FEATURES["based" if kind == "exact" else kind], "heads": H, "width": mixer.key_width}
    how |= {name: b.weight(mixer, name, H) for name in ("scale", "constant") if getattr(mixer, name) is not None}
    for name, heads in (("q", H), ("k", G)):
        y = b.room(f"{name} features", H * F)
        b.stage("Features", beside=name == "q", x=name, y=y, groups=heads, floor=FLOOR, **how)
    matrix(b, "sum_BHKV", H, F, V, q="q features", k="k features", v_heads=G, mean=True)
    b.product("mixed", H * V, (mixer, "o_proj", D, out.y), added=out.added)


@stages_of("hla2", "ahla", "hla3")
def higher_order(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    H, K, D, stages = mixer.config.num_heads, mixer.config.width, mixer.config.hidden_size, range(mixer.stages)
    project(b, mixer, x, dict.fromkeys("qk", H * K))
    b.product(x, D, (mixer, "v_proj", H * K, b.room("v", H * K)))
    gates: dict[str, Any] = {}
    if mixer.gate_proj is not None:
        b.split(x, D, mixer, "gate_proj", **{f"gate {i}": Rows(H, "logsigmoid") for i in stages})
        gates = {"decays": 1, "decay_scale": 1 / mixer.options.gate_temperature}
    for name in ("q", "k"):
        unit_length(b, name, H, K, 1e-14)
    if mixer.rotary is not None:
        turn(b, mixer, K)
    names, last = {"k": "k", "v": "v"}, stages[-1]
    composed = [name for name, is_so in (("k", mixer.composed_keys), ("v", mixer.composed_values)) if is_so]
    for i, name in enumerate([*composed, "mixed"]):
        g = f"gate {i}" if gates else None
        sources = names if i == last else {"k": "k", "v": name}
        y = "mixed" if i == last else f"composed {name}"
        matrix(b, f"stages.{i}.sum_BHKV", H, K, K, y, g=g, **gates, **sources)
        names[name] = y
    _head_norm(b, mixer, K)
    b.product("mixed", H * K, (mixer, "o_proj", D, out.y), added=out.added)


@stages_of("fem")
def free_energy(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    config, prior = mixer.config, mixer.options.prior
    H, K, D = config.num_heads, config.width, config.hidden_size
    parts = (("q", "q"), ("k", "k"), ("v", "values"))
    b.product(x, D, *((mixer, f"{name}_proj", H * K, b.room(y, H * K)) for name, y in parts))
    b.product(x, D, (mixer, "choice_proj", H * K, b.room("choice", H * K)), act="sigmoid", beside=True)
    b.product(x, D, (mixer, "gate_proj", H * K, b.room("gate", H * K)), act="softplus")
    b.stage("Norm", beside=True, x="gate", y="gate", width=K, groups=H, eps=config.norm_eps)
    how: dict[str, Any] = {"weight": b.weight(mixer, "beta", H, K), "heads": H, "width": K, "floor": fem.FLOOR}
    b.stage("Energy", x="values", y=b.room("v", 2 * H * K), range=fem.RANGE, **how)
    both = b.room("both", 2 * H * K)
    if prior == "softmax":
        attention = Attention(b, at, ALL, mixer.rotary, sizes=Sizes(H, H, K, 2 * K))
        attention.keep()
        attention.attend(both)
    else:
        features = [("q", H, K), ("k", H, K)]
        decay: dict[str, Any] = {}
        if prior == "gla":
            b.product(x, D, (mixer, "decay_proj", H, b.room("decay", H)))
            features.append(("decay", 1, H))
            decay = {"g": "decay", "decays": 1, "decay_scale": -1.0}
        for name, heads, width in features:
            how_many = {"heads": heads, "groups": heads, "width": width}
            alone = name == features[-1][0]
            b.stage("Features", beside=not alone, x=name, y=name, kind=FEATURES["relu"], floor=fem.FLOOR, **how_many)
        matrix(b, "sum_BHKV", H, K, 2 * K, both, mean=True, **decay)
    b.stage("Energy", x=both, choice="choice", y=b.room("mixed", H * K), **how)
    gated_output(b, mixer, H * K, out)
