"""One token of a single Latte layer with few kernels: for models whose other layers the engine does not know."""

from __future__ import annotations

import torch
from torch import Tensor

from latte.layers.feeds import GATE_POWER, RGLRU, ConvFeed
from latte.layers.hooks import unhooked
from latte.layers.linear import Linear, split_heads
from latte.layers.window import Window
from latte.mixers.latte import LatteMixer, LatteMixerState
from latte.modes import values_hidden
from latte.ops import ConvState, LatteState, ScanState, WindowState, native
from latte.ops.registry import kernels_serve
from latte.state import State
from latte.tokens import Tokens


def latte_step(mixer: LatteMixer, x_B1D: Tensor, state: State, tokens: Tokens) -> tuple[Tensor, State] | None:
    """Output and state of one token a row, without gradients; None where the mixer's own code has to run."""
    if not _serves(mixer, x_B1D, tokens):
        return None
    assert isinstance(state, LatteMixerState)
    heads, x_BD = mixer.config.num_heads, x_B1D[:, 0]
    z_BD, feed = _feed(mixer, x_BD, state.feed, tokens)
    slots_BD, k_BD = _project(z_BD, mixer.latent_q_proj, mixer.latent_k_proj)
    window = None
    if mixer.window is None:
        v_BGV = mixer.values(x_B1D)[:, 0]
    else:
        assert isinstance(state.window, WindowState)
        v_BGV, q_BHK, k_BGK = _heads(mixer, mixer.window, x_BD)
        window = _window(mixer, mixer.window, q_BHK, k_BGK, state.window, tokens)
    y_BHV, log_norm_BHM, mean_BHMV, ring = native.macchiato_step(
        split_heads(slots_BD, heads),
        split_heads(k_BD, heads),
        v_BGV,
        state.latents.log_norm_BHM,
        state.latents.mean_BHMV,
        window,
        *_flags(tokens),
    )
    after = None if ring is None else WindowState(*ring[:4])
    y_B1D = mixer.project(y_BHV[:, None], x_B1D)
    return y_B1D, LatteMixerState(feed, LatteState(log_norm_BHM, mean_BHMV), after)


def _serves(mixer: LatteMixer, x_B1D: Tensor, tokens: Tokens) -> bool:
    if values_hidden(x_B1D) or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    if mixer.options.decay != "none" or mixer.options.kept:
        return False
    parts = [mixer.feed] if mixer.window is None else [mixer.feed, mixer.window]
    return unhooked(*parts) and kernels_serve(x_B1D)


def _flags(tokens: Tokens) -> tuple[Tensor | None, Tensor | None]:
    """Mask and reset of one token a row, (B) each."""
    mask, reset = (None if flags is None else flags[:, 0] for flags in (tokens.mask, tokens.reset))
    return mask, reset


def _feed(mixer: LatteMixer, x_BD: Tensor, state: State | None, tokens: Tokens) -> tuple[Tensor, State | None]:
    feed = mixer.feed
    if type(feed) is RGLRU and isinstance(state, ScanState):
        weights = (feed.gate_weight, feed.gate_bias, feed.decay)
        z_BD, h_BD, _ = native.rglru_step(x_BD, *weights, GATE_POWER, state.h_BD, tokens.start_B, *_flags(tokens))
        after: State | None = ScanState(h_BD)
    elif type(feed) is ConvFeed and isinstance(state, ConvState) and tokens.plain:
        seen_BKD = torch.cat([state.tail_BKD, x_BD[:, None]], dim=1)
        z_BD, after = (seen_BKD * feed.weight.T).sum(dim=1), ConvState(seen_BKD[:, 1:])
    else:
        z_B1D, after = feed(x_BD[:, None], state, tokens)
        z_BD = z_B1D[:, 0]
    return (z_BD if mixer.feed_norm is None else mixer.feed_norm(z_BD[:, None])[:, 0]), after


def _heads(mixer: LatteMixer, window: Window, x_BD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, queries and keys of one token."""
    if type(window) is not Window:
        q_B1HK, k_B1GK = window.queries_and_keys(x_BD[:, None])
        return mixer.values(x_BD[:, None])[:, 0], q_B1HK[:, 0], k_B1GK[:, 0]
    heads, groups = mixer.config.num_heads, mixer.config.kv_heads
    v_BD, q_BD, k_BD = _project(x_BD, mixer.v_proj, window.q_proj, window.k_proj)
    return split_heads(v_BD, groups), split_heads(q_BD, heads), split_heads(k_BD, groups)


def _window(
    mixer: LatteMixer, window: Window, q_BHK: Tensor, k_BGK: Tensor, state: WindowState, tokens: Tokens
) -> native.WindowStep:
    rings = (state.keys_BRGK, state.values_BRGV, state.sink_keys_BNGK, state.sink_values_BNGV, tokens.start_B)
    step = native.WindowStep(q_BHK, k_BGK, *rings, None, window.softcap, mixer.slot0_bias, mixer.options.coupled)
    step = step._replace(scale=window.scale)
    if not window.rope:
        return step
    rotary = window.rotary
    speeds = native.rotary_speeds(rotary.frequencies)
    return step._replace(speeds=speeds, stretch=rotary.stretch, exact_from=rotary.rounded_below)


def _project(x_BD: Tensor, *projections: Linear) -> list[Tensor]:
    """Several projections of the same few rows: one pass over all their weights where it can be."""
    plain = all(type(layer) is Linear and unhooked(layer) for layer in projections)
    if plain and x_BD.shape[0] <= native.FEW_ROWS:
        return native.products(x_BD, [layer.weight for layer in projections])
    return [layer(x_BD) for layer in projections]
