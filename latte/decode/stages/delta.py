"""The delta rule: DeltaNet, Gated DeltaNet with its log-linear form, and KDA."""

from __future__ import annotations

from typing import Any

from latte.decode.program import Builder
from latte.decode.stages.parts import convolve, gated_output, levels, low_rank, matrix, project, unit_length
from latte.decode.stages.registry import Out, stages_of
from latte.mixers.log_linear import HasLevels
from latte.models.engine import Mixing


def _delta(b: Builder, mixer: Any, x: str, **decay: Any) -> None:
    """From x to normed heads in "mixed"."""
    H, G, K, V, D = (
        mixer.config.num_heads,
        mixer.key_heads,
        mixer.key_width,
        mixer.value_width,
        mixer.config.hidden_size,
    )
    widths = {"q": G * K, "k": G * K, "v": H * V}
    project(b, mixer, x, widths)
    b.product(x, D, (mixer, "b_proj", H, b.room("rate", H)), act="sigmoid")
    convolve(b, mixer, "conv.tail_BKD", widths, act="silu")
    for name in ("q", "k"):
        unit_length(b, name, G, K)
    how: dict[str, Any] = {"delta": True, "write": "rate", "q_heads": G, "k_heads": G, "query_scale": K**-0.5}
    how["key_scale"] = 2.0 if mixer.options.negative_eigenvalues else 1.0
    state = "memory.map_BHKV"
    if isinstance(mixer, HasLevels):  # queries have no scale there
        state, how = "memory.levels_BLHKV", how | levels(b, mixer, x) | {"query_scale": 1.0}
    matrix(b, state, H, K, V, **how, **decay)
    b.norm(b.child(mixer, "norm"), "mixed", "mixed", V, groups=H)


@stages_of("deltanet")
def deltanet(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    width = mixer.config.num_heads * mixer.value_width
    _delta(b, mixer, x)
    b.product("mixed", width, (mixer, "o_proj", mixer.config.hidden_size, out.y), added=out.added)


@stages_of("gated-deltanet", "log-linear-gated-deltanet")
def gated_deltanet(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    H, V, D = mixer.config.num_heads, mixer.value_width, mixer.config.hidden_size
    b.product(x, D, (mixer, "g_proj", H * V, b.room("gate", H * V)), act="silu", beside=True)
    bias = b.weight(mixer, "dt_bias", H)
    b.product(x, D, (mixer, "a_proj", H, b.room("decay", H)), act="softplus", bias=bias, beside=True)
    _delta(b, mixer, x, g="decay", decays=1, log_rate=b.weight(mixer, "A_log", H))
    gated_output(b, mixer, H * V, out)


@stages_of("kda")
def kda(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    H, K, V = mixer.config.num_heads, mixer.key_width, mixer.value_width
    low_rank(b, mixer, "gate_proj", x, "gate", H * V, act="sigmoid")
    low_rank(b, mixer, "decay_proj", x, "decay", H * K, act="softplus", bias=b.weight(mixer, "dt_bias", H * K))
    _delta(b, mixer, x, g="decay", log_rate=b.weight(mixer, "A_log", H))
    gated_output(b, mixer, H * V, out)
