"""Full softmax attention with a cache of all keys and values: the quadratic baseline (equations 1-3)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from latte.modes import transformed, values_hidden
from latte.ops.nonfinite import none_of, nonfinite_tokens, seen_since, spoiled, without
from latte.ops.registry import Draw, Example, operation
from latte.shapes import Axes, require_divides
from latte.state import State, require_state, state
from latte.tokens import Tokens, require_tokens

# Packed documents are attended to one by one while there are no more than this many in a batch.
MOST_DOCUMENTS = 64


@state
class AttentionState(State):
    """Every key and value so far, and which of them still belong to the document."""

    free = "S"
    growth = "linear"

    keys_BSGK: Tensor
    values_BSGV: Tensor
    live_BS: Tensor

    @classmethod
    def empty(cls, like_BT: Tensor, kv_heads: int, key_width: int, value_width: int) -> AttentionState:
        B, device = like_BT.shape[0], like_BT.device
        return cls(
            like_BT.new_zeros(B, 0, kv_heads, key_width),
            like_BT.new_zeros(B, 0, kv_heads, value_width),
            torch.zeros(B, 0, dtype=torch.bool, device=device),
        )


def softmax_attention_reference(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    causal: bool,
    scale: float,
    state: AttentionState,
    tokens: Tokens,
) -> tuple[Tensor, AttentionState | None]:
    """Equations (2) and (3) as written. Quadratic."""
    after = extended(k_BTGK, v_BTGV, state, tokens)
    q, k, v = _heads_first(q_BTHK, after)
    logits_BHTS = (q @ k.transpose(-1, -2)) * scale
    seen_BTS = _seen(state, tokens, causal)
    weights_BHTS = logits_BHTS.masked_fill(~seen_BTS[:, None], float("-inf")).softmax(dim=-1)
    flags_BS = nonfinite_tokens(after.values_BSGV)
    y_BTHV = (weights_BHTS @ without(flags_BS[:, None], v)).transpose(1, 2)
    y_BTHV = spoiled((seen_BTS & flags_BS[:, None]).any(dim=2), y_BTHV)
    return tokens.zero_padding(y_BTHV), after if causal else None


def softmax_attention_fused(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    causal: bool,
    scale: float,
    state: AttentionState,
    tokens: Tokens,
) -> tuple[Tensor, AttentionState | None]:
    """Torch's fused attention, on its path without a mask wherever no mask is needed. Quadratic."""
    after = read = extended(k_BTGK, v_BTGV, state, tokens)
    past = state.keys_BSGK.shape[1]
    flags_BS = nonfinite_tokens(after.keys_BSGK, after.values_BSGV)
    finite = none_of(flags_BS)
    if not finite:
        read = AttentionState(without(flags_BS, after.keys_BSGK), without(flags_BS, after.values_BSGV), after.live_BS)
    if tokens.mask is None and past == 0 and (spans := _documents(tokens)) is not None:
        parts = []
        for row, start, stop in spans:
            here = (slice(None) if row is None else slice(row, row + 1), slice(start, stop))
            part = AttentionState(read.keys_BSGK[here], read.values_BSGV[here], read.live_BS)
            q, k, v = _heads_first(q_BTHK[here], part)
            parts.append(_attend(q, k, v, is_causal=causal, scale=scale))
        whole = len(parts) == 1
        y_BTHV = parts[0] if whole else torch.cat(parts, dim=1).unflatten(1, (tokens.batch, -1))[0]
        if not finite:
            seen_BT = seen_since(flags_BS, tokens)
            if not causal:
                seen_BT = seen_BT | seen_since(flags_BS.flip(1), tokens.reversed).flip(1)
            y_BTHV = spoiled(seen_BT, y_BTHV)
    else:
        q, k, v = _heads_first(q_BTHK, read)
        seen_BTS = _seen(state, tokens, causal)
        y_BTHV = _attend(q, k, v, attn_mask=seen_BTS[:, None], scale=scale)
        if not finite:
            y_BTHV = spoiled((seen_BTS & flags_BS[:, None]).any(dim=2), y_BTHV)
    return tokens.zero_padding(y_BTHV), after if causal else None


def _attend(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, **options: Any) -> Tensor:
    """Fused attention as (B, T, H, V); while a function is transformed the plain one, which has all derivatives."""
    with sdpa_kernel(SDPBackend.MATH) if transformed() else nullcontext():
        return F.scaled_dot_product_attention(q_BHTK, k_BHSK, v_BHSV, **options).transpose(1, 2)


def _documents(tokens: Tokens) -> list[tuple[int | None, int, int]] | None:
    """Row, start and stop of every document of a batch; row None stands for all rows. None: too many to go through."""
    if tokens.reset is None:
        return [(None, 0, tokens.length)]
    if values_hidden(tokens.reset):
        return None
    starts = F.pad(tokens.reset[:, 1:], (1, 0), value=True).nonzero().tolist()
    if len(starts) > MOST_DOCUMENTS:
        return None
    stops = [start if same else tokens.length for start, same in _following(starts)]
    return [(row, start, stop) for (row, start), stop in zip(starts, stops, strict=True)]


def _following(starts: list[list[int]]) -> list[tuple[int, bool]]:
    """For each document, where the next one starts and whether it is in the same row."""
    behind = [*starts[1:], [-1, 0]]
    return [(start, row == before[0]) for before, (row, start) in zip(starts, behind, strict=True)]


def extended(k_BTGK: Tensor, v_BTGV: Tensor, state: AttentionState, tokens: Tokens) -> AttentionState:
    last_B1 = tokens.segment_BT[:, -1:]
    live_BT = tokens.real_BT & (tokens.segment_BT == last_B1)
    if state.keys_BSGK.shape[1] == 0:
        return AttentionState(k_BTGK, v_BTGV, live_BT)
    return AttentionState(
        torch.cat([state.keys_BSGK, k_BTGK], dim=1),
        torch.cat([state.values_BSGV, v_BTGV], dim=1),
        torch.cat([state.live_BS & (last_B1 == 0), live_BT], dim=1),
    )


def _heads_first(q_BTHK: Tensor, read: AttentionState) -> tuple[Tensor, Tensor, Tensor]:
    """(B, H, tokens, width) of all three, key and value heads repeated for the query heads of their group."""
    repeat = q_BTHK.shape[2] // read.keys_BSGK.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q_BTHK, read.keys_BSGK, read.values_BSGV))
    if repeat > 1:
        k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    return q, k, v


def _seen(state: AttentionState, tokens: Tokens, causal: bool) -> Tensor:
    """Which keys, those of the state first, each token looks at: (B, T, S)."""
    carried_BTP = (tokens.segment_BT == 0)[:, :, None] & state.live_BS[:, None, :]
    seen_BTS = torch.cat([carried_BTP, tokens.seen_BTS(causal)], dim=2)
    # A softmax over nothing is undefined: padding looks at itself, and its output is dropped afterwards.
    alone_TT = torch.eye(tokens.length, dtype=torch.bool, device=tokens.device)
    return seen_BTS | F.pad(alone_TT & ~tokens.real_BT[:, :, None], (state.live_BS.shape[1], 0))


def _example(draw: Draw) -> Example:
    return tuple(draw.normal(draw.B, draw.T, heads, width) for heads, width in ((4, 16), (2, 16), (2, 24))), {}


@operation(reference=softmax_attention_reference, chunked=softmax_attention_fused, example=_example, autocast=True)
def softmax_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """Softmax attention, equations (1) to (3), to all s <= t, or with ``causal=False`` to the whole document.

    Shapes: q (B, T, H, K), k (B, T, G, K), v (B, T, G, V), H a multiple of G. Returns y (B, T, H, V), 0 at padding, and
    the :class:`AttentionState` after these tokens, which grows by one key and value a token; None without ``causal``.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, a state of something else, or a state
            without ``causal``.
    """
    axes = Axes("softmax_attention")
    axes.bind("q", q_BTHK, "BTHK")
    axes.bind("k", k_BTGK, "BTGK")
    sizes = axes.bind("v", v_BTGV, "BTGV")
    require_divides("softmax_attention", sizes["G"], sizes["H"], "key/value heads", "query heads")
    if state is not None and not causal:
        raise ValueError("softmax_attention: a state was given with causal=False, expected none")
    tokens = require_tokens("softmax_attention", tokens, q_BTHK, state)
    empty = AttentionState.empty(q_BTHK, sizes["G"], sizes["K"], sizes["V"])
    before = require_state("softmax_attention", state, empty)
    scale = sizes["K"] ** -0.5 if scale is None else scale
    return q_BTHK, k_BTGK, v_BTGV, causal, scale, before, tokens
