"""Mamba, Mamba-2 with its log-linear form, and KLA, whose filters stand in the place of Mamba's states."""

from __future__ import annotations

from typing import Any

from torch import nn

from latte.decode.program import Builder, Rows
from latte.decode.stages.parts import convolve, gated_output, group_norm, levels, matrix, unit_length
from latte.decode.stages.registry import Out, stages_of
from latte.mixers.kla import LEAST_VARIANCE
from latte.mixers.log_linear import HasLevels
from latte.mixers.mamba import LARGEST_LOG_RATE
from latte.mixers.mamba2 import GatedRMSNorm
from latte.models.engine import Mixing


@stages_of("mamba")
def mamba(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    W, P, rank = mixer.width, mixer.options.state_size, mixer.rank
    b.split(x, mixer.config.hidden_size, mixer, "in_proj", x=Rows(W), gate=Rows(W, "silu"))
    convolve(b, mixer, "conv.tail_BKD", {"x": W}, act="silu")
    b.split("x", W, mixer, "x_proj", low=Rows(rank), b=Rows(P), c=Rows(P))
    bias = b.weight(mixer, "dt_bias", W)
    b.product("low", rank, (mixer, "dt_proj", W, b.room("delta", W)), act="softplus", bias=bias)
    weights: dict[str, Any] = {"log_rate": b.weight(mixer, "A_log", W, P), "skip": b.weight(mixer, "D", W)}
    # The module leaves room for rounding above the largest rate.
    how: dict[str, Any] = {"width": W, "size": P, "most": LARGEST_LOG_RATE + 1, "h": b.part("scan.h_BDP")}
    b.stage("Selective", x="x", delta="delta", b="b", c="c", y=b.room("mixed", W), **weights, **how)
    gated_output(b, mixer, W, out, "out_proj")


@stages_of("mamba2", "log-linear-mamba2")
def mamba2(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    H, W, G, K, V = mixer.num_heads, mixer.inner, mixer.options.num_groups, mixer.options.state_size, mixer.config.width
    steps = Rows(H, "softplus", b.weight(mixer, "dt_bias", H))
    parts = {"gate": Rows(W, "silu"), "v": Rows(W), "k": Rows(G * K), "q": Rows(G * K), "step": steps}
    b.split(x, mixer.config.hidden_size, mixer, "in_proj", **parts)
    convolve(b, mixer, "conv.tail_BKD", {"v": W, "k": G * K, "q": G * K}, act="silu")
    how: dict[str, Any] = {"g": "step", "decays": 1, "write": "step", "q_heads": G, "k_heads": G}
    how |= {"log_rate": b.weight(mixer, "A_log", H), "skip": b.weight(mixer, "D", H)}
    state = "memory.sum_BHKV"
    if isinstance(mixer, HasLevels):
        state, how = "memory.levels_BLHKV", how | levels(b, mixer, x)
    matrix(b, state, H, K, V, **how)
    b.stage("Gate", x="mixed", gate="gate", y="mixed", width=W)
    norm = b.child(mixer, "norm", GatedRMSNorm)
    group_norm(b, norm, "mixed", norm.groups, W // norm.groups, norm.eps)
    b.product("mixed", W, (mixer, "out_proj", mixer.config.hidden_size, out.y), added=out.added)


@stages_of("kla")
def kla(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    W, N, noise = mixer.width, mixer.options.state_size, b.child(mixer, "noise_proj", nn.Sequential)
    b.split(x, mixer.config.hidden_size, mixer, "in_proj", v=Rows(W), gate=Rows(W, "silu"))
    convolve(b, mixer, "conv.tail_BKD", {"v": W}, act="silu")
    rank = b.child(noise, "0").out_features
    b.product("v", W, (noise, "0", rank, b.room("low", rank)), *((mixer, f"{n}_proj", N, b.room(n, N)) for n in "kq"))
    for name in ("k", "q"):
        unit_length(b, name, 1, N, 1e-14)
    b.product("low", rank, (noise, "1", W, b.room("variance", W)), act="softplus")
    weights: dict[str, Any] = {name: b.weight(mixer, name, W, N) for name in ("log_step", "log_rate", "log_variance")}
    weights["skip"] = b.weight(mixer, "skip", 1)
    parts: dict[str, Any] = {"precision": b.part("filters.precision_BDN"), "mean": b.part("filters.mean_BDN")}
    how: dict[str, Any] = {"variance": "variance", "width": W, "size": N, "least": LEAST_VARIANCE}
    b.stage("Kalman", v="v", k="k", q="q", y=b.room("mixed", W), **weights, **parts, **how)
    gated_output(b, mixer, W, out, "out_proj")
