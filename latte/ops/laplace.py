"""Attention with the Laplace function of Mega in the place of the softmax: every weight by itself, between 0 and 1.

    y_t = sum_s phi(q_t . k_s) v_s        phi(x) = (1 + erf((x - sqrt(1/2)) / sqrt(1/(2 pi)))) / 2

Nothing is divided by a sum of weights, so the past needs no normaliser; queries come scaled.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from latte.ops.nonfinite import none_of, nonfinite_tokens, spoiled, without
from latte.ops.numbers import compute_dtype
from latte.ops.recompute import recomputed
from latte.ops.registry import Draw, Example, operation
from latte.ops.softmax import AttentionState, extended
from latte.ops.window import Reach, WindowState, over_band
from latte.shapes import Axes
from latte.state import State, require_state
from latte.tokens import Tokens, require_tokens

# Queries whose weights are in memory at once.
BLOCK = 128


def laplace(x: Tensor) -> Tensor:
    """The distribution function of a normal variable with mean sqrt(1/2) and variance 1/(4 pi): near relu(x)^2."""
    return 0.5 * (1 + torch.erf((x - math.sqrt(0.5)) * math.sqrt(2 * math.pi)))


def laplace_attention_reference(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    causal: bool,
    left: int | None,
    state: AttentionState | WindowState,
    tokens: Tokens,
) -> tuple[Tensor, AttentionState | WindowState | None]:
    """All pairs of tokens at once. Quadratic."""
    return _attend(q_BTHK, k_BTHK, v_BTHV, causal, left, state, tokens, tokens.length)


def laplace_attention_blocked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    causal: bool,
    left: int | None,
    state: AttentionState | WindowState,
    tokens: Tokens,
) -> tuple[Tensor, AttentionState | WindowState | None]:
    """Block by block of queries, each against the keys that it may see: memory linear in T."""
    return _attend(q_BTHK, k_BTHK, v_BTHV, causal, left, state, tokens, BLOCK)


def _attend(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    causal: bool,
    left: int | None,
    state: Any,
    tokens: Tokens,
    block: int,
) -> tuple[Tensor, AttentionState | WindowState | None]:
    if left is not None:

        def band(q: Tensor, k: Tensor, v: Tensor, segment_BT: Tensor, segment_BS: Tensor, reach: Reach) -> Any:
            return _banded(q, k, v, segment_BT, segment_BS, reach, block), q.new_zeros(q.shape[:3])

        reach = Reach(left, 0 if causal else left, 1.0, None)
        y_BTHV, _, window = over_band(band, q_BTHK, k_BTHK, v_BTHV, q_BTHK, reach, state, tokens)
        return y_BTHV, window
    after = extended(k_BTHK, v_BTHV, state, tokens)
    past, outputs = state.keys_BSGK.shape[1], []
    # What the state holds belongs to document 0, what is dead in it and padding to none.
    segment_BS = torch.where(tokens.real_BT, tokens.segment_BT, -2)
    segment_BS = torch.cat([torch.where(state.live_BS, 0, -2), segment_BS], dim=1)
    place_S = torch.arange(past + tokens.length, device=q_BTHK.device)
    for start in range(0, tokens.length, block):
        here = slice(start, min(start + block, tokens.length))
        keys = slice(0, past + here.stop if causal else None)
        seen_BCS = tokens.segment_BT[:, here, None] == segment_BS[:, None, keys]
        if causal:
            seen_BCS = seen_BCS & (place_S[keys] <= place_S[past + here.start : past + here.stop, None])
        parts = (q_BTHK[:, here], after.keys_BSGK[:, keys], after.values_BSGV[:, keys], seen_BCS)
        outputs.append(recomputed(_weighted, *parts))
    return tokens.zero_padding(torch.cat(outputs, dim=1)), after if causal else None


def _banded(
    q_BTHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, segment_BT: Tensor, segment_BS: Tensor, reach: Reach, block: int
) -> Tensor:
    """Queries against a band of keys; query t stands at key left + t."""
    T, device, outputs = q_BTHK.shape[1], q_BTHK.device, []
    for start in range(0, T, block):
        here = slice(start, min(start + block, T))
        keys = slice(start, here.stop + reach.left + reach.right)
        offset_CS = torch.arange(k_BSHK[:, keys].shape[1], device=device) - torch.arange(
            here.stop - start, device=device
        ).unsqueeze(1)
        near_CS = (offset_CS >= 0) & (offset_CS <= reach.left + reach.right)
        seen_BCS = near_CS & (segment_BT[:, here, None] == segment_BS[:, None, keys])
        outputs.append(recomputed(_weighted, q_BTHK[:, here], k_BSHK[:, keys], v_BSHV[:, keys], seen_BCS))
    return torch.cat(outputs, dim=1)


def _weighted(q_BCHK: Tensor, k_BSHK: Tensor, v_BSHV: Tensor, seen_BCS: Tensor) -> Tensor:
    """The sum over what is seen (B, C, H, V)."""
    dtype = compute_dtype(q_BCHK)
    flags_BS = nonfinite_tokens(k_BSHK, v_BSHV)
    finite = none_of(flags_BS)
    if not finite:
        k_BSHK, v_BSHV = without(flags_BS, k_BSHK), without(flags_BS, v_BSHV)
    products_BHCS = torch.einsum("bchk,bshk->bhcs", q_BCHK.to(dtype), k_BSHK.to(dtype))
    weights_BHCS = torch.where(seen_BCS[:, None], laplace(products_BHCS), 0.0)
    y_BCHV = torch.einsum("bhcs,bshv->bchv", weights_BHCS, v_BSHV.to(dtype))
    if not finite:
        y_BCHV = spoiled((seen_BCS & flags_BS[:, None]).any(dim=2), y_BCHV)
    return y_BCHV.to(v_BSHV.dtype)


def _example(draw: Draw) -> Example:
    return tuple(draw.normal(draw.B, draw.T, 2, width) for width in (16, 16, 24)), {"left": 20}


@operation(reference=laplace_attention_reference, chunked=laplace_attention_blocked, example=_example)
def laplace_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    *,
    causal: bool = True,
    left: int | None = None,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """y_t = sum_s phi(q_t . k_s) v_s over all s <= t of the document, or the last ``left``; not causal: on both sides.

    Shapes: q and k (B, T, H, K), v (B, T, H, V). Distances count real tokens only. Returns y (B, T, H, V), 0 at
    padding, and the state after these tokens: an :class:`AttentionState`, which grows by one key and value a token, or
    with ``left`` a :class:`WindowState`; None without ``causal``.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, a negative ``left``, a state of something
            else, or a state without ``causal``.
    """
    op = "laplace_attention"
    axes = Axes(op)
    axes.bind("q", q_BTHK, "BTHK")
    axes.bind("k", k_BTHK, "BTHK")
    sizes = axes.bind("v", v_BTHV, "BTHV")
    if left is not None and left < 0:
        raise ValueError(f"{op}: left is {left}, expected a whole number of tokens, at least 0")
    if state is not None and not causal:
        raise ValueError(f"{op}: a state was given with causal=False, expected none")
    tokens = require_tokens(op, tokens, q_BTHK, state)
    widths = (sizes["H"], sizes["K"], sizes["V"])
    empty = AttentionState.empty(q_BTHK, *widths) if left is None else WindowState.empty(q_BTHK, left, 0, *widths)
    return q_BTHK, k_BTHK, v_BTHV, causal, left, require_state(op, state, empty), tokens
