"""Latte and Latte-Macchiato, in our models and around pretrained attention."""

from __future__ import annotations

from typing import Any

from latte.decode.program import Builder
from latte.decode.stages.attention import RING, Attention, queries_keys_values
from latte.decode.stages.feeds import feed
from latte.decode.stages.kept import KeptTokens
from latte.decode.stages.registry import Out, stages_of
from latte.models.engine import Mixing
from latte.ops import native


@stages_of("latte", "extended")
def latte(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    config, window = mixer.config, mixer.window
    D, H, G, V, M = config.hidden_size, config.num_heads, config.kv_heads, config.width, mixer.latents_per_head
    fed = feed(b, mixer, x)
    attention = bias = kept = None
    if window is None:
        b.product(x, D, (at.values, "v_proj", G * V, b.room("v", G * V)))
    else:
        queries_keys_values(b, at, x)
        rotary = window.rotary if window.rope else None
        kept = KeptTokens(b, at, x) if window.kept else None
        paths = tuple(f"window.{name}" if kept is None else f"window.window.{name}" for name in RING)
        how = {"scale": window.scale, "softcap": window.softcap, "farthest": window.farthest}
        attention = Attention(b, at, paths, rotary, window.size, window.sinks, **how)
        bias = None if mixer.slot0_bias is None else b.weight(mixer, "slot0_bias", H)
    if mixer.feed_norm is not None:
        b.norm(b.child(mixer, "feed_norm"), fed, b.room("fed", D), D)
        fed = "fed"
    if attention is not None:
        attention.keep(beside=True)
    slots, keys = (mixer, "latent_q_proj", H * mixer.slots), (mixer, "latent_k_proj", H * M)
    b.product(fed, D, (*slots, b.room("slots", H * mixer.slots)), (*keys, b.room("latent k", H * M)))
    rates = _rates(b, mixer, fed, D, H * M)
    seen = log_norm = None
    if attention is not None:
        seen = b.room("seen", H * V)
        log_norm = b.room("window norm", H) if mixer.options.coupled or kept is not None else None
        attention.attend(seen, log_norm)
        if kept is not None and log_norm is not None:
            kept.attend(attention, seen, log_norm)
    sizes: dict[str, Any] = {"heads": H, "groups": G, "latents": M, "value_width": V, "rates": rates}
    sizes |= {"log_norm": b.part("latents.log_norm_BHM"), "mean": b.part("latents.mean_BHMV")}
    sizes |= {"seen": seen, "window_norm": log_norm if mixer.options.coupled else None, "bias": bias}
    b.stage("Latents", slots="slots", k="latent k", v="v", y=b.room("mixed", H * V), **sizes)
    b.product("mixed", H * V, (at.values, "o_proj", D, out.y), added=out.added)


def _rates(b: Builder, mixer: Any, fed: str, width: int, latents: int) -> str | None:
    """How fast each latent forgets; None where they don't."""
    if mixer.latent_decay is None:
        return None
    bias, rates = b.weight(mixer, "latent_decay", latents), b.room("rates", latents)
    if mixer.decay_proj is None:
        b.stage("Map", bias=bias, y=rates, width=latents, act=native.ACTIVATIONS["softplus"])
    else:
        b.product(fed, width, (mixer, "decay_proj", latents, rates), act="softplus", bias=bias)
    return rates
