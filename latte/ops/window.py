"""Sliding-window softmax attention, Macchiato's slot 0 (equation 17), in linear time and memory.

A token sees itself, the ``left`` tokens before it and the ``right`` after it (causal: right = 0), in its own document.
The causal state is a ring of the last ``left`` keys and values: the token at place n of its document stands in slot
n mod left, so decoding overwrites one slot and never moves the others.

Sinks: the first ``sinks`` tokens of the document stay in sight behind the window. Pretrained models park attention
there. ``sink_query`` may carry the queries turned for another distance than the real one, which grows without bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops import native
from latte.ops.gated import pad_tokens
from latte.ops.nonfinite import none_of, nonfinite_tokens, spoiled, without
from latte.ops.numbers import EMPTY, bounded_exp, compute_dtype, log_add
from latte.ops.registry import Draw, Example, operation
from latte.shapes import Axes, require_divides
from latte.state import State, require_state, state
from latte.tokens import Tokens, require_tokens, take_tokens

# Queries that share a block of keys; scratch memory is bounded by a few of these blocks at a time.
QUERY_BLOCK = 64
BLOCK = 2048


@state
class WindowState(State):
    """The last keys and values of the document in a ring, and its first ones."""

    keys_BRGK: Tensor
    values_BRGV: Tensor
    sink_keys_BNGK: Tensor
    sink_values_BNGV: Tensor

    @classmethod
    def empty(
        cls, like_BT: Tensor, left: int, sinks: int, kv_heads: int, key_width: int, value_width: int
    ) -> WindowState:
        B = like_BT.shape[0]
        return cls(
            like_BT.new_zeros(B, left, kv_heads, key_width),
            like_BT.new_zeros(B, left, kv_heads, value_width),
            like_BT.new_zeros(B, sinks, kv_heads, key_width),
            like_BT.new_zeros(B, sinks, kv_heads, value_width),
        )


class Reach(NamedTuple):
    """What a token sees and how scores are made: the numbers that every form takes."""

    left: int
    right: int
    scale: float
    softcap: float | None


def _begun(state: WindowState | None, k_BTGK: Tensor, v_BTGV: Tensor, reach: Reach) -> WindowState:
    """The state, or the one before the first token where there are no sinks."""
    if state is not None:
        return state
    heads, width = k_BTGK.shape[2:]
    return WindowState.empty(k_BTGK, reach.left, 0, heads, width, v_BTGV.shape[3])


def window_attention_reference(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    sink_query_BTHK: Tensor,
    reach: Reach,
    state: WindowState | None,
    tokens: Tokens,
) -> tuple[Tensor, Tensor, WindowState | None]:
    """Equation (17) as written, over all pairs of tokens and all that the state holds. Quadratic in T."""
    state = _begun(state, k_BTGK, v_BTGV, reach)
    dtype = compute_dtype(q_BTHK)
    B, _, H, _ = q_BTHK.shape
    left, n_sinks = reach.left, state.sink_keys_BNGK.shape[1]
    place_BT, segment_BT, count_B1 = tokens.place_BT, tokens.segment_BT, tokens.start_B[:, None]
    slots_BR = torch.arange(left, device=q_BTHK.device).expand(B, -1)
    ring_BR = count_B1 - 1 - (count_B1 - 1 - slots_BR) % max(left, 1)
    sink_BN = torch.arange(n_sinks, device=q_BTHK.device).expand(B, -1)
    # A sink that is also in the ring counts once, by the ring.
    sink_there_BN = (sink_BN < count_B1) & (sink_BN < count_B1 - left)
    place_BS = torch.cat([sink_BN, ring_BR, place_BT], dim=1)
    there_BS = torch.cat([sink_there_BN, ring_BR >= 0, tokens.real_BT], dim=1)
    segment_BS = torch.cat([torch.zeros_like(sink_BN), torch.zeros_like(ring_BR), segment_BT], dim=1)
    repeat = H // k_BTGK.shape[2]
    k_BSHK, v_BSHV = (
        torch.cat(parts, dim=1).to(dtype).repeat_interleave(repeat, 2)
        for parts in (
            (state.sink_keys_BNGK, state.keys_BRGK, k_BTGK),
            (state.sink_values_BNGV, state.values_BRGV, v_BTGV),
        )
    )
    distance_BTS = place_BT[:, :, None] - place_BS[:, None, :]
    near_BTS = (distance_BTS <= left) & (distance_BTS >= -reach.right)
    sunk_BTS = (distance_BTS > left) & (place_BS < n_sinks)[:, None, :]
    seen_BTS = (segment_BT[:, :, None] == segment_BS[:, None, :]) & there_BS[:, None, :] & (near_BTS | sunk_BTS)
    logits_BHTS = torch.einsum("bthk,bshk->bhts", q_BTHK.to(dtype), k_BSHK)
    sink_logits_BHTS = torch.einsum("bthk,bshk->bhts", sink_query_BTHK.to(dtype), k_BSHK)
    logits_BHTS = scaled_and_capped(torch.where(sunk_BTS[:, None], sink_logits_BHTS, logits_BHTS), reach)
    logits_BHTS = torch.where(seen_BTS[:, None], logits_BHTS, EMPTY)
    flags_BS = nonfinite_tokens(v_BSHV)
    y_BTHV = torch.einsum("bhts,bshv->bthv", logits_BHTS.softmax(dim=-1), without(flags_BS, v_BSHV))
    y_BTHV = spoiled((seen_BTS & flags_BS[:, None]).any(dim=2), y_BTHV)
    after = None if reach.right else window_state(k_BTGK, v_BTGV, state, tokens)
    return tokens.zero_padding(y_BTHV).to(v_BTGV.dtype), logits_BHTS.logsumexp(dim=-1).transpose(1, 2), after


def window_attention_step(
    q_B1HK: Tensor,
    k_B1GK: Tensor,
    v_B1GV: Tensor,
    sink_query_B1HK: Tensor,
    reach: Reach,
    state: WindowState | None,
    tokens: Tokens,
) -> tuple[Tensor, Tensor, WindowState | None]:
    """One token: look at the ring in whatever order it stands, then overwrite its oldest slot."""
    if reach.right:
        return window_attention_banded(q_B1HK, k_B1GK, v_B1GV, sink_query_B1HK, reach, state, tokens)
    state = _begun(state, k_B1GK, v_B1GV, reach)
    dtype = compute_dtype(q_B1HK)
    left, n_sinks = reach.left, state.sink_keys_BNGK.shape[1]
    device = q_B1HK.device
    count_B1 = tokens.start_B[:, None]
    if tokens.reset is not None:
        count_B1 = torch.where(tokens.reset, 0, count_B1)
    seen_BS = [torch.arange(left, device=device) < count_B1, torch.ones_like(count_B1, dtype=torch.bool)]
    logits_BHS = [one_query_logits(q_B1HK, keys, reach) for keys in (state.keys_BRGK, k_B1GK)]
    values = [state.values_BRGV, v_B1GV]
    if n_sinks:
        seen_BS.append(torch.arange(n_sinks, device=device) < count_B1 - left)
        logits_BHS.append(one_query_logits(sink_query_B1HK, state.sink_keys_BNGK, reach))
        values.append(state.sink_values_BNGV)
    logits = torch.where(torch.cat(seen_BS, dim=1)[:, None], torch.cat(logits_BHS, dim=-1), EMPTY)
    norm_B1H = logits.logsumexp(dim=-1)[:, None]
    weights_BHS = logits.softmax(dim=-1).unflatten(1, (k_B1GK.shape[2], -1))
    v_BGSV = torch.cat(values, dim=1).to(dtype).transpose(1, 2)
    y_B1HV = (weights_BHS @ v_BGSV).flatten(1, 2)[:, None]
    after = window_state(k_B1GK, v_B1GV, state, tokens)
    return tokens.zero_padding(y_B1HV).to(v_B1GV.dtype), norm_B1H, after


def window_attention_banded(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    sink_query_BTHK: Tensor,
    reach: Reach,
    state: WindowState | None,
    tokens: Tokens,
) -> tuple[Tensor, Tensor, WindowState | None]:
    """Blocks of queries against the band of keys that they see: linear in T."""
    return over_band(_banded, q_BTHK, k_BTGK, v_BTGV, sink_query_BTHK, reach, state, tokens)


def native_window(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    sink_query_BTHK: Tensor,
    reach: Reach,
    state: WindowState | None,
    tokens: Tokens,
) -> tuple[Tensor, Tensor, WindowState | None]:
    if tokens.from_start and (state is None or not state.sink_keys_BNGK.shape[1]):
        # Whole rows from their start, as in training: nothing to look back to, to move or to tell apart.
        y, norm = native.window_attention(q_BTHK, k_BTGK, v_BTGV, None, None, *reach)
        return y, norm, None if reach.right else first_window_state(k_BTGK, v_BTGV, reach.left)
    return over_band(_native_band, q_BTHK, k_BTGK, v_BTGV, sink_query_BTHK, reach, state, tokens)


def _native_band(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, segment_BT: Tensor, segment_BS: Tensor, reach: Reach
) -> tuple[Tensor, Tensor]:
    return native.window_attention(q_BTHK, k_BSGK, v_BSGV, segment_BT, segment_BS, *reach)


def first_window_state(k_BTGK: Tensor, v_BTGV: Tensor, left: int) -> WindowState:
    """The state after whole rows of one document each, without sinks: the last tokens, each in its slot."""
    T = k_BTGK.shape[1]
    if left >= T:
        k_BRGK, v_BRGV = (pad_tokens(x, left - T) for x in (k_BTGK, v_BTGV))
    else:
        k_BRGK, v_BRGV = (_last(x, left) for x in (k_BTGK, v_BTGV))
    # Not a view of no tokens: it would hold the memory of all.
    return WindowState(k_BRGK, v_BRGV, *(x.new_empty((x.shape[0], 0, *x.shape[2:])) for x in (k_BTGK, v_BTGV)))


def _last(x_BTGK: Tensor, left: int) -> Tensor:
    """The last ``left`` tokens, token t in slot t mod left, in memory of their own."""
    T = x_BTGK.shape[1]
    turn = T - T % max(left, 1)  # this token is in slot 0
    if turn == T:
        return torch.narrow_copy(x_BTGK, 1, T - left, left)  # a clone of this size wakes threads
    return torch.cat([x_BTGK[:, turn:], x_BTGK[:, T - left : turn]], dim=1)


def window_state(k_BTGK: Tensor, v_BTGV: Tensor, state: WindowState, tokens: Tokens) -> WindowState:
    """The state after these tokens: each slot keeps what it has, or takes the latest token that belongs there."""
    left, n_sinks = state.keys_BRGK.shape[1], state.sink_keys_BNGK.shape[1]
    T, device = k_BTGK.shape[1], k_BTGK.device
    count_B = tokens.count_B
    if tokens.compact is not None:
        k_BTGK, v_BTGV = tokens.compact.gather(k_BTGK), tokens.compact.gather(v_BTGV)
    start_B1 = (tokens.read_B - count_B)[:, None]  # where the document begins among these tokens; negative: before them

    def refill(old_BN: Tensor, new_BT: Tensor, place_BN: Tensor) -> Tensor:
        index_BN = start_B1 + place_BN
        fresh_BN = (index_BN >= 0) & (place_BN >= 0) & (place_BN < count_B[:, None])
        taken_BN = take_tokens(new_BT, index_BN.clamp(0, T - 1))
        return torch.where(fresh_BN[..., None, None], taken_BN, old_BN)

    last_B1 = count_B[:, None] - 1
    ring_BR = last_B1 - (last_B1 - torch.arange(left, device=device)) % max(left, 1)
    sink_BN = torch.arange(n_sinks, device=device).expand(count_B.shape[0], -1)
    return WindowState(
        refill(state.keys_BRGK, k_BTGK, ring_BR),
        refill(state.values_BRGV, v_BTGV, ring_BR),
        refill(state.sink_keys_BNGK, k_BTGK, sink_BN),
        refill(state.sink_values_BNGV, v_BTGV, sink_BN),
    )


def over_band(
    band: Callable[..., tuple[Tensor, Tensor]],
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    sink_query_BTHK: Tensor,
    reach: Reach,
    state: WindowState | None,
    tokens: Tokens,
) -> tuple[Tensor, Tensor, WindowState | None]:
    """The window over rows without gaps: history from the ring in front, padding moved to the back."""
    state = _begun(state, k_BTGK, v_BTGV, reach)
    after = None if reach.right else window_state(k_BTGK, v_BTGV, state, tokens)
    left, place_BT, segment_BT, moved = reach.left, tokens.place_BT, tokens.segment_BT, tokens.compact
    if moved is not None:
        q_BTHK, k_BTGK, v_BTGV, place_BT, sink_query_BTHK = (
            moved.gather(x) for x in (q_BTHK, k_BTGK, v_BTGV, place_BT, sink_query_BTHK)
        )
        # Padding belongs to no document, not even to one with other padding.
        segment_BT = moved.gather(torch.where(tokens.real_BT, segment_BT, -1))
    place_BR = tokens.start_B[:, None] - left + torch.arange(left, device=q_BTHK.device)
    ring = [take_tokens(x, place_BR % max(left, 1)) for x in (state.keys_BRGK, state.values_BRGV)]
    k_BSGK, v_BSGV = (torch.cat(pair, dim=1) for pair in zip(ring, (k_BTGK, v_BTGV), strict=True))
    segment_BS = torch.cat([torch.where(place_BR >= 0, 0, -2), torch.where(segment_BT < 0, -2, segment_BT)], dim=1)
    y_BTHV, log_norm_BTH = band(q_BTHK, k_BSGK, v_BSGV, segment_BT, segment_BS, reach)
    if state.sink_keys_BNGK.shape[1]:
        y_BTHV, log_norm_BTH = _add_sinks(
            y_BTHV, log_norm_BTH, k_BTGK, v_BTGV, sink_query_BTHK, state, place_BT, reach, tokens.plain
        )
    if moved is not None:
        y_BTHV, log_norm_BTH = moved.scatter(y_BTHV), moved.scatter(log_norm_BTH)
    return tokens.zero_padding(y_BTHV).to(v_BTGV.dtype), log_norm_BTH, after


def _banded(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    segment_BT: Tensor,
    segment_BS: Tensor,
    reach: Reach,
) -> tuple[Tensor, Tensor]:
    """Outputs and log-normalisers of queries against a band of keys; query t stands at key left + t."""
    dtype, left, right = compute_dtype(q_BTHK), reach.left, reach.right
    T, G = q_BTHK.shape[1], k_BSGK.shape[2]
    size = min(QUERY_BLOCK, T)
    span = left + size + right
    device = q_BTHK.device
    offset = torch.arange(span, device=device) - torch.arange(size, device=device)[:, None]
    band_CS = (offset >= 0) & (offset <= left + right)
    flags_BS = nonfinite_tokens(v_BSGV)
    finite = none_of(flags_BS)
    if not finite:
        v_BSGV = without(flags_BS, v_BSGV)
    outputs, norms = [], []
    for start in range(0, T, BLOCK):
        tokens = min(BLOCK, T - start)
        extra = -tokens % size
        q = pad_tokens(q_BTHK[:, start : start + tokens].to(dtype), extra)
        # (B, N, G, queries of the group's heads, K)
        q = q.unflatten(1, (-1, size)).unflatten(3, (G, -1)).permute(0, 1, 3, 4, 2, 5).flatten(3, 4)
        band = slice(start, start + left + tokens + right)
        behind = tokens + extra + left + right - (min(band.stop, k_BSGK.shape[1]) - start)
        k, v = (pad_tokens(x[:, band].to(dtype), behind).unfold(1, span, size) for x in (k_BSGK, v_BSGV))
        segment_q = F.pad(segment_BT[:, start : start + tokens], (0, extra), value=-1).unflatten(1, (-1, size))
        segment_k = F.pad(segment_BS[:, band], (0, behind), value=-2).unfold(1, span, size)
        seen = band_CS & (segment_q[..., :, None] == segment_k[..., None, :])  # (B, N, C, span)
        logits = scaled_and_capped(q @ k, reach).unflatten(3, (-1, size))
        seen = seen[:, :, None, None]  # (B, N, G, H/G, C, span)
        top = torch.where(seen, logits.detach(), EMPTY).amax(dim=-1, keepdim=True)
        weights = torch.where(seen, bounded_exp(logits - top), 0.0)
        total = weights.sum(dim=-1, keepdim=True)
        some = total != 0  # NaN is not nothing
        norm = torch.where(some, top + torch.where(some, total, 1.0).log(), EMPTY)
        weights = weights / torch.where(some, total, 1.0)
        y = weights.flatten(3, 4) @ v.transpose(-1, -2)
        y = y.unflatten(3, (-1, size)).permute(0, 1, 4, 2, 3, 5).flatten(1, 2).flatten(2, 3)
        if not finite:
            flags = F.pad(flags_BS[:, band], (0, behind)).unfold(1, span, size)
            y = spoiled((seen[:, :, 0, 0] & flags[:, :, None]).any(dim=-1).flatten(1, 2), y)
        outputs.append(y[:, :tokens])
        norms.append(norm[..., 0].permute(0, 1, 4, 2, 3).flatten(1, 2).flatten(2, 3)[:, :tokens])
    return torch.cat(outputs, dim=1), torch.cat(norms, dim=1)


def _add_sinks(
    y_BTHV: Tensor,
    log_norm_BTH: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    sink_query_BTHK: Tensor,
    state: WindowState,
    place_BT: Tensor,
    reach: Reach,
    one_document: bool,
) -> tuple[Tensor, Tensor]:
    """Bring the first tokens of each query's document, where they lie behind the window, under its softmax."""
    dtype = y_BTHV.dtype
    T = place_BT.shape[1]
    n, G = state.sink_keys_BNGK.shape[1:3]
    sink_N = torch.arange(n, device=y_BTHV.device)
    start_BT = torch.arange(T, device=y_BTHV.device) - place_BT
    if one_document:  # the same few keys for every query of a row
        start_BT = start_BT[:, :1]
    index_BTN = start_BT[..., None] + sink_N
    # A document that began before these tokens has its first ones in the state.
    source_BTN = torch.where(index_BTN >= 0, n + index_BTN.clamp(max=T - 1), sink_N)
    k_BTNGK, v_BTNGV = (
        take_tokens(torch.cat([old, new], dim=1), source_BTN.flatten(1)).unflatten(1, source_BTN.shape[1:]).to(dtype)
        for old, new in ((state.sink_keys_BNGK, k_BTGK), (state.sink_values_BNGV, v_BTGV))
    )
    scores, mix = (
        ("btgrk,bngk->btgrn", "btgrn,bngv->btgrv") if one_document else ("btgrk,btngk->btgrn", "btgrn,btngv->btgrv")
    )
    keys, values = (x[:, 0] if one_document else x for x in (k_BTNGK, v_BTNGV))
    behind_BTN = sink_N < place_BT[..., None] - reach.left
    q_BTGRK = sink_query_BTHK.to(dtype).unflatten(2, (G, -1))
    logits = scaled_and_capped(torch.einsum(scores, q_BTGRK, keys), reach).flatten(2, 3)
    logits = torch.where(behind_BTN[:, :, None], logits, EMPTY)
    total_BTH = log_add(log_norm_BTH, logits.logsumexp(dim=-1))
    weights = (logits - total_BTH[..., None]).exp().unflatten(2, (G, -1))
    flags = nonfinite_tokens(values.reshape(-1, n, *values.shape[-2:])).reshape(values.shape[:-2])
    sunk = torch.einsum(mix, weights, without(flags, values)).flatten(2, 3)
    sunk = spoiled((behind_BTN & flags.reshape(len(flags), -1, n)).any(dim=-1), sunk)
    return (log_norm_BTH - total_BTH).exp()[..., None] * y_BTHV + sunk, total_BTH


def one_query_logits(q_B1HK: Tensor, k_BSGK: Tensor, reach: Reach) -> Tensor:
    """(B, H, S) logits of one query."""
    dtype = compute_dtype(q_B1HK)
    q_BGRK = q_B1HK[:, 0].to(dtype).unflatten(1, (k_BSGK.shape[2], -1))
    return scaled_and_capped((q_BGRK @ k_BSGK.to(dtype).permute(0, 2, 3, 1)).flatten(1, 2), reach)


def scaled_and_capped(products: Tensor, reach: Reach) -> Tensor:
    """Logits of queries times keys: scaled, and capped if that is asked for."""
    logits = products * reach.scale
    return logits if reach.softcap is None else reach.softcap * torch.tanh(logits / reach.softcap)


def _example(draw: Draw) -> Example:
    shapes = ((4, 16), (2, 16), (2, 24))
    return tuple(draw.normal(draw.B, draw.T, *shape) for shape in shapes), {"left": 20, "sinks": 2, "softcap": 9.0}


@operation(
    reference=window_attention_reference,
    chunked=window_attention_banded,
    step=window_attention_step,
    native=native_window,
    example=_example,
)
def window_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    *,
    left: int,
    right: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: int = 0,
    sink_query: Tensor | None = None,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """Softmax attention to t - left <= s <= t + right, equation (17) with ``left`` = w: w + 1 keys.

    Shapes: q (B, T, H, K), k (B, T, G, K), v (B, T, G, V), H a multiple of G. Distances count real tokens only.
    ``scale`` defaults to 1/sqrt(K). Returns y (B, T, H, V), 0 at padding; the log of the sum that normalises each
    query's weights (B, T, H), -1e30 where nothing is seen; and the :class:`WindowState`, None when ``right`` > 0.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, a negative window, a state of something
            else, or a state or sinks together with ``right`` > 0.
    """
    op = "window_attention"
    axes = Axes(op)
    axes.bind("q", q_BTHK, "BTHK")
    axes.bind("k", k_BTGK, "BTGK")
    sizes = axes.bind("v", v_BTGV, "BTGV")
    if sink_query is not None:
        axes.bind("sink_query", sink_query, "BTHK")
    require_divides(op, sizes["G"], sizes["H"], "key/value heads", "query heads")
    for name, value in (("left", left), ("right", right), ("sinks", sinks)):
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{op}: {name} is {value!r}, expected a whole number of tokens, at least 0")
    if right and (state is not None or sinks):
        raise ValueError(f"{op}: right is {right}; a state and sinks are for causal windows, expected right = 0")
    tokens = require_tokens(op, tokens, q_BTHK, state)
    before = None
    if state is not None or sinks:  # whole rows need no ring of zeros in front of them
        empty = WindowState.empty(q_BTHK, left, sinks, sizes["G"], sizes["K"], sizes["V"])
        before = require_state(op, state, empty)
    reach = Reach(left, right, sizes["K"] ** -0.5 if scale is None else scale, softcap)
    return q_BTHK, k_BTGK, v_BTGV, q_BTHK if sink_query is None else sink_query, reach, before, tokens
