"""A window that keeps tokens: softmax attention to the last tokens, the first, and the N best-scored between them.

Every token has a score per key/value head. Behind the window stay, of each document, the N tokens with the best scores
among those that left the window and are no sinks; of equal scores the earlier stays. A token that was dropped never
comes back, so the state is N keys, values, scores and places beside the window's. Window, sinks and kept tokens are
under one softmax. Cost and memory are linear in the number of tokens: a block of C queries gathers at most N + C keys.

Scores choose, which has no gradient. With a ``weight`` w they also count: the logit of a kept token j is
cap(scale q.k_j) + w s_j.

Distances: with :class:`Far` a kept token more than ``reach`` tokens back is looked at as if it were ``reach`` back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from latte.ops.kept_attend import attend_natively, attend_to_selection
from latte.ops.kept_selection import (
    KEPT_BLOCK,
    Events,
    Selection,
    select_blocked,
    select_native,
    select_reference,
    worst_slot,
)
from latte.ops.kept_state import Far, KeptState, all_sources, state_after, take_heads
from latte.ops.numbers import EMPTY, compute_dtype, log_add
from latte.ops.registry import Draw, Example, operation
from latte.ops.window import (
    Reach,
    WindowState,
    native_window,
    one_query_logits,
    window_attention_banded,
    window_attention_reference,
    window_attention_step,
)
from latte.shapes import Axes, require_divides
from latte.state import State, require_state
from latte.tokens import Tokens, require_tokens, take_tokens

#: Scores are bounded: an empty slot (EMPTY) is worse than every token, and a score of NaN is the worst of all.
MOST = 1e29


def kept_attention_reference(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    s_BTG: Tensor,
    weight_G: Tensor | None,
    sink_query_BTHK: Tensor,
    far: Far | None,
    reach: Reach,
    state: KeptState,
    tokens: Tokens,
) -> tuple[Tensor, Tensor, KeptState]:
    """The rule token by token, then all pairs."""
    window = window_attention_reference(q_BTHK, k_BTGK, v_BTGV, sink_query_BTHK, reach, state.window, tokens)
    forms = (select_reference, attend_to_selection, 1)
    return _with_kept(window, *forms, q_BTHK, k_BTGK, v_BTGV, s_BTG, weight_G, far, reach, state, tokens)


def kept_attention_chunked(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    s_BTG: Tensor,
    weight_G: Tensor | None,
    sink_query_BTHK: Tensor,
    far: Far | None,
    reach: Reach,
    state: KeptState,
    tokens: Tokens,
) -> tuple[Tensor, Tensor, KeptState]:
    """Blocks of queries against the keys that one of them sees: linear in T."""
    window = window_attention_banded(q_BTHK, k_BTGK, v_BTGV, sink_query_BTHK, reach, state.window, tokens)
    forms = (select_blocked, attend_to_selection, KEPT_BLOCK)
    return _with_kept(window, *forms, q_BTHK, k_BTGK, v_BTGV, s_BTG, weight_G, far, reach, state, tokens)


def _native(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    s_BTG: Tensor,
    weight_G: Tensor | None,
    sink_query_BTHK: Tensor,
    far: Far | None,
    reach: Reach,
    state: KeptState,
    tokens: Tokens,
) -> tuple[Tensor, Tensor, KeptState]:
    window = native_window(q_BTHK, k_BTGK, v_BTGV, sink_query_BTHK, reach, state.window, tokens)
    forms = (select_native, attend_natively, KEPT_BLOCK)
    return _with_kept(window, *forms, q_BTHK, k_BTGK, v_BTGV, s_BTG, weight_G, far, reach, state, tokens)


def _with_kept(
    window: tuple[Tensor, Tensor, WindowState | None],
    select: Callable[..., Selection],
    attend: Callable[..., tuple[Tensor, Tensor]],
    size: int,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    s_BTG: Tensor,
    weight_G: Tensor | None,
    far: Far | None,
    reach: Reach,
    state: KeptState,
    tokens: Tokens,
) -> tuple[Tensor, Tensor, KeptState]:
    """The kept tokens of whole rows brought under the window's softmax, and the state after them."""
    place_BT, segment_BT, moved = tokens.place_BT, tokens.segment_BT, tokens.compact
    if moved is not None:
        q_BTHK, k_BTGK, v_BTGV, s_BTG, place_BT = (moved.gather(x) for x in (q_BTHK, k_BTGK, v_BTGV, s_BTG, place_BT))
        segment_BT = moved.gather(torch.where(tokens.real_BT, segment_BT, -1))
        far = None if far is None else far._replace(query_BTHK=moved.gather(far.query_BTHK))
    sources = all_sources(k_BTGK, v_BTGV, s_BTG, place_BT, far, state, tokens)
    T, N = q_BTHK.shape[1], state.kept_keys_BNGK.shape[1]
    there_BT = (segment_BT >= 0) & (place_BT - reach.left >= state.window.sink_keys_BNGK.shape[1])
    events = Events(sources.scores_BSG[:, N : N + T].detach(), there_BT, segment_BT)
    scores_BGN, places_BGN = (x.transpose(1, 2) for x in (state.kept_scores_BNG.detach(), state.kept_places_BNG))
    selection = select(scores_BGN, places_BGN, events)
    y_BTHV, log_norm_BTH = attend(q_BTHK, sources, selection, size, place_BT, weight_G, far, reach)
    if moved is not None:
        y_BTHV, log_norm_BTH = moved.scatter(y_BTHV), moved.scatter(log_norm_BTH)
    y_window, norm_window, window_after = window
    assert window_after is not None
    y_BTHV, log_norm_BTH = _under_one_softmax(y_window, norm_window, y_BTHV, log_norm_BTH)
    after = state_after(sources, selection, window_after, reach.left, far, tokens)
    return tokens.zero_padding(y_BTHV).to(v_BTGV.dtype), log_norm_BTH, after


def kept_attention_step(
    q_B1HK: Tensor,
    k_B1GK: Tensor,
    v_B1GV: Tensor,
    s_B1G: Tensor,
    weight_G: Tensor | None,
    sink_query_B1HK: Tensor,
    far: Far | None,
    reach: Reach,
    state: KeptState,
    tokens: Tokens,
) -> tuple[Tensor, Tensor, KeptState]:
    """One token: look at the slots, then let the token that leaves the window take one."""
    window = window_attention_step(q_B1HK, k_B1GK, v_B1GV, sink_query_B1HK, reach, state.window, tokens)
    y_B1HV, log_norm_B1H, window_after = window
    assert window_after is not None
    dtype, G = compute_dtype(q_B1HK), k_B1GK.shape[2]
    place_B11, places_BNG = tokens.place_BT[:, :, None], state.kept_places_BNG
    if tokens.reset is not None:
        places_BNG = torch.where(tokens.reset[..., None], -1, places_BNG)
    logits_BHN = one_query_logits(q_B1HK, state.kept_keys_BNGK, reach)
    if far is not None:
        beyond_BHN = _per_query_head(place_B11 - places_BNG > far.reach, q_B1HK)
        others_BHN = one_query_logits(far.query_BTHK, state.kept_keys_BNGK, reach)
        logits_BHN = torch.where(beyond_BHN, others_BHN, logits_BHN)
    if weight_G is not None:
        logits_BHN = logits_BHN + _per_query_head(weight_G.to(dtype) * state.kept_scores_BNG, q_B1HK)
    logits_BHN = torch.where(_per_query_head(places_BNG >= 0, q_B1HK), logits_BHN, EMPTY)
    weights_BGRN = logits_BHN.softmax(dim=-1).unflatten(1, (G, -1))
    kept_B1HV = (weights_BGRN @ state.kept_values_BNGV.to(dtype).transpose(1, 2)).flatten(1, 2)[:, None]
    kept_norm_B1H = logits_BHN.logsumexp(dim=-1)[:, None]
    y_B1HV, log_norm_B1H = _under_one_softmax(y_B1HV, log_norm_B1H, kept_B1HV, kept_norm_B1H)
    after = _step_state(k_B1GK, v_B1GV, s_B1G, far, reach, state, places_BNG, window_after, tokens)
    return tokens.zero_padding(y_B1HV).to(v_B1GV.dtype), log_norm_B1H, after


def _per_query_head(x_BNG: Tensor, q_B1HK: Tensor) -> Tensor:
    return x_BNG.transpose(1, 2).repeat_interleave(q_B1HK.shape[2] // x_BNG.shape[2], dim=1)


def _step_state(
    k_B1GK: Tensor,
    v_B1GV: Tensor,
    s_B1G: Tensor,
    far: Far | None,
    reach: Reach,
    state: KeptState,
    places_BNG: Tensor,
    window: WindowState,
    tokens: Tokens,
) -> KeptState:
    """The state after one token."""
    left, place_B11, real_B11 = reach.left, tokens.place_BT[:, :, None], tokens.real_BT[:, :, None]
    if left:  # the oldest of the ring goes, and this token takes its place
        slot_B1 = tokens.place_BT % left
        ring = (state.window.keys_BRGK, state.window.values_BRGV, state.scores_BRG)
        k_gone_B1GK, v_gone_B1GV, s_gone_B1G = (take_tokens(x, slot_B1) for x in ring)
        new = real_B11 & (torch.arange(left, device=k_B1GK.device)[:, None] == slot_B1[..., None])
        ring_scores_BRG = torch.where(new, s_B1G, state.scores_BRG)
    else:
        (k_gone_B1GK, v_gone_B1GV, s_gone_B1G), ring_scores_BRG = (k_B1GK, v_B1GV, s_B1G), state.scores_BRG
    slot_BG, least_BG = worst_slot(state.kept_scores_BNG.transpose(1, 2), places_BNG.transpose(1, 2))
    there_B11 = real_B11 & (place_B11 - left >= state.window.sink_keys_BNGK.shape[1])
    taken_B1G = there_B11 & (s_gone_B1G > least_BG[:, None])
    slot_N1 = torch.arange(places_BNG.shape[1], device=slot_BG.device)[:, None]
    here_BNG = taken_B1G & (slot_N1 == slot_BG[:, None])
    keys_BNGK = torch.where(here_BNG[..., None], k_gone_B1GK, state.kept_keys_BNGK)
    places_BNG = torch.where(here_BNG, place_B11 - left, places_BNG)
    if far is not None:  # at most one token a head is now one too far
        beyond_BNG = real_B11 & (places_BNG >= 0) & (place_B11 - places_BNG == far.reach)
        index_B1G = beyond_BNG.to(torch.uint8).argmax(dim=1, keepdim=True)
        back_B1GK = far.turn_back(take_heads(keys_BNGK, index_B1G), torch.gather(places_BNG, 1, index_B1G).clamp(min=0))
        keys_BNGK = torch.where(beyond_BNG[..., None], back_B1GK, keys_BNGK)
    return KeptState(
        window,
        ring_scores_BRG,
        keys_BNGK,
        torch.where(here_BNG[..., None], v_gone_B1GV, state.kept_values_BNGV),
        torch.where(here_BNG, s_gone_B1G, torch.where(places_BNG < 0, EMPTY, state.kept_scores_BNG)),
        places_BNG,
    )


def _under_one_softmax(y: Tensor, log_norm: Tensor, other: Tensor, other_norm: Tensor) -> tuple[Tensor, Tensor]:
    total = log_add(log_norm, other_norm)
    return (log_norm - total).exp()[..., None] * y + (other_norm - total).exp()[..., None] * other, total


def _of_this_document(state: KeptState, left: int, tokens: Tokens) -> KeptState:
    """Without what was kept of another document: its places are not those of tokens that have left the window."""
    left_B11 = tokens.start_B[:, None, None] - left
    places_BNG = torch.where(state.kept_places_BNG < left_B11, state.kept_places_BNG, -1)
    return dataclasses.replace(state, kept_places_BNG=places_BNG)


def _example(draw: Draw) -> Example:
    shapes = ((4, 16), (2, 16), (2, 24), (2,))
    tensors = tuple(draw.normal(draw.B, draw.T, *shape) for shape in shapes)
    return tensors, {"left": 20, "kept": 12, "sinks": 2, "weight": draw.normal(2)}


@operation(
    reference=kept_attention_reference,
    chunked=kept_attention_chunked,
    step=kept_attention_step,
    native=_native,
    example=_example,
)
def kept_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    s_BTG: Tensor,
    *,
    left: int,
    kept: int,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: int = 0,
    sink_query: Tensor | None = None,
    weight: Tensor | None = None,
    far: Far | None = None,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """Softmax attention to t - left <= s <= t, the first ``sinks`` tokens, and the ``kept`` best-scored between them.

    Shapes: q (B, T, H, K), k (B, T, G, K), v (B, T, G, V), scores s (B, T, G), H a multiple of G; ``weight`` (G), of
    scores in logits. Everything else is as in :func:`window_attention`. Returns y (B, T, H, V), 0 at padding; the log
    of the sum that normalises each query's weights (B, T, H), -1e30 at padding; and the :class:`KeptState`.

    A state has to be continued with ``far`` if one of the tokens it has read or will read next is out of reach.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, a negative window, less than one kept token,
            a reach within the window, or a state of something else.
    """
    op = "kept_attention"
    axes = Axes(op)
    axes.bind("q", q_BTHK, "BTHK")
    axes.bind("k", k_BTGK, "BTGK")
    axes.bind("v", v_BTGV, "BTGV")
    # Scores may be wider than the rest: bfloat16 has eight bits to tell tokens apart.
    sizes = axes.bind("s", s_BTG.to(q_BTHK.dtype) if s_BTG.dtype == compute_dtype(q_BTHK) else s_BTG, "BTG")
    if sink_query is not None:
        axes.bind("sink_query", sink_query, "BTHK")
    if weight is not None:
        axes.bind("weight", weight, "G")
    require_divides(op, sizes["G"], sizes["H"], "key/value heads", "query heads")
    for name, value, least in (("left", left, 0), ("sinks", sinks, 0), ("kept", kept, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{op}: {name} is {value!r}, expected a whole number of tokens, at least {least}")
    if far is not None:
        axes.bind("far.query", far.query_BTHK, "BTHK")
        if far.reach <= left:
            raise ValueError(f"{op}: reach is {far.reach}, expected more than left ({left})")
    tokens = require_tokens(op, tokens, q_BTHK, state)
    empty = KeptState.empty(q_BTHK, left, sinks, kept, sizes["G"], sizes["K"], sizes["V"])
    before = _of_this_document(require_state(op, state, empty), left, tokens) if state is not None else empty
    scores_BTG = torch.nan_to_num(s_BTG.to(compute_dtype(s_BTG)), nan=-MOST).clamp(-MOST, MOST)
    reach = Reach(left, 0, sizes["K"] ** -0.5 if scale is None else scale, softcap)
    query = q_BTHK if sink_query is None else sink_query
    return q_BTHK, k_BTGK, v_BTGV, scores_BTG, weight, query, far, reach, before, tokens
