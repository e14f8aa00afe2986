"""A window that keeps tokens: softmax attention to the last tokens, the first, and the N best-scored between them.

Every token has a score per key/value head. Behind the window stay, of each document, the N tokens with the best scores
among those that left the window and are no sinks; of equal scores the earlier stays. A token that was dropped never
comes back, so the state is N keys, values, scores and places beside the window's. Window, sinks and kept tokens are
under one softmax. Cost and memory are linear in the number of tokens: a block of C queries gathers at most N + C keys.

Scores choose, which has no gradient. With a ``weight`` w they also count: the logit of a kept token j is
cap(scale q.k_j) + w s_j.

With ``received`` r the score of a token is s_j + r log(the attention that it got while the window saw it), in sum over
queries and heads: known when it leaves the window.

Distances: with :class:`Far` a kept token more than ``reach`` tokens back is looked at as if it were ``reach`` back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.kept_attend import attend_natively, attend_to_selection
from latte.ops.kept_received import bounded, received_in_window, scores_with_received
from latte.ops.kept_selection import (
    KEPT_BLOCK,
    Events,
    Selection,
    select_blocked,
    select_native,
    select_reference,
)
from latte.ops.kept_state import Far, KeptState, Sources, Weights, all_sources, state_after
from latte.ops.kept_step import kept_attention_step, under_one_softmax
from latte.ops.numbers import compute_dtype
from latte.ops.registry import Draw, Example, operation
from latte.ops.window import (
    Reach,
    WindowState,
    native_window,
    window_attention_banded,
    window_attention_reference,
)
from latte.shapes import Axes, require_divides
from latte.state import State, require_state
from latte.tokens import Tokens, require_tokens, take_tokens


def kept_attention_reference(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    s_BTG: Tensor,
    weights: Weights,
    sink_query_BTHK: Tensor,
    far: Far | None,
    reach: Reach,
    state: KeptState,
    tokens: Tokens,
) -> tuple[Tensor, Tensor, KeptState]:
    """The rule token by token, then all pairs."""
    window = window_attention_reference(q_BTHK, k_BTGK, v_BTGV, sink_query_BTHK, reach, state.window, tokens)
    forms = (select_reference, attend_to_selection, 1)
    return _with_kept(window, *forms, q_BTHK, k_BTGK, v_BTGV, s_BTG, weights, far, reach, state, tokens)


def kept_attention_chunked(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    s_BTG: Tensor,
    weights: Weights,
    sink_query_BTHK: Tensor,
    far: Far | None,
    reach: Reach,
    state: KeptState,
    tokens: Tokens,
) -> tuple[Tensor, Tensor, KeptState]:
    """Blocks of queries against the keys that one of them sees: linear in T."""
    window = window_attention_banded(q_BTHK, k_BTGK, v_BTGV, sink_query_BTHK, reach, state.window, tokens)
    forms = (select_blocked, attend_to_selection, KEPT_BLOCK)
    return _with_kept(window, *forms, q_BTHK, k_BTGK, v_BTGV, s_BTG, weights, far, reach, state, tokens)


def _native(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    s_BTG: Tensor,
    weights: Weights,
    sink_query_BTHK: Tensor,
    far: Far | None,
    reach: Reach,
    state: KeptState,
    tokens: Tokens,
) -> tuple[Tensor, Tensor, KeptState]:
    window = native_window(q_BTHK, k_BTGK, v_BTGV, sink_query_BTHK, reach, state.window, tokens)
    forms = (select_native, attend_natively, KEPT_BLOCK)
    return _with_kept(window, *forms, q_BTHK, k_BTGK, v_BTGV, s_BTG, weights, far, reach, state, tokens)


def _with_kept(
    window: tuple[Tensor, Tensor, WindowState | None],
    select: Callable[..., Selection],
    attend: Callable[..., tuple[Tensor, Tensor]],
    size: int,
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    s_BTG: Tensor,
    weights: Weights,
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
    if weights.received_G is not None:
        sources = _with_received(sources, weights, q_BTHK, window[1], segment_BT, reach, state, tokens)
    there_BT = (segment_BT >= 0) & (place_BT - reach.left >= state.window.sink_keys_BNGK.shape[1])
    events = Events(sources.scores_BSG[:, N : N + T].detach(), there_BT, segment_BT)
    scores_BGN, places_BGN = (x.transpose(1, 2) for x in (state.kept_scores_BNG.detach(), state.kept_places_BNG))
    selection = select(scores_BGN, places_BGN, events)
    y_BTHV, log_norm_BTH = attend(q_BTHK, sources, selection, size, place_BT, weights.logits_G, far, reach)
    if moved is not None:
        y_BTHV, log_norm_BTH = moved.scatter(y_BTHV), moved.scatter(log_norm_BTH)
    y_window, norm_window, window_after = window
    assert window_after is not None
    y_BTHV, log_norm_BTH = under_one_softmax(y_window, norm_window, y_BTHV, log_norm_BTH)
    after = state_after(sources, selection, window_after, reach.left, far, tokens)
    return tokens.zero_padding(y_BTHV).to(v_BTGV.dtype), log_norm_BTH, after


def _with_received(
    sources: Sources,
    weights: Weights,
    q_BTHK: Tensor,
    log_norm_BTH: Tensor,
    segment_BT: Tensor,
    reach: Reach,
    state: KeptState,
    tokens: Tokens,
) -> Sources:
    """The scores of the ring and of these tokens, with the attention that they receive until they leave the window."""
    assert weights.received_G is not None
    assert state.received_BRG is not None
    N, left = state.kept_keys_BNGK.shape[1], reach.left
    if tokens.compact is not None:
        log_norm_BTH = tokens.compact.gather(log_norm_BTH)
    place_BR = tokens.start_B[:, None] - left + torch.arange(left, device=q_BTHK.device)
    segment_BS = torch.cat([torch.where(place_BR >= 0, 0, -2), torch.where(segment_BT < 0, -2, segment_BT)], dim=1)
    keys_BSGK = sources.keys_BSGK[:, N:]
    received_BSG = received_in_window(q_BTHK, keys_BSGK, log_norm_BTH, segment_BT, segment_BS, reach)
    before_BRG = take_tokens(state.received_BRG, place_BR % max(left, 1))
    received_BSG = received_BSG + F.pad(before_BRG, (0, 0, 0, q_BTHK.shape[1]))
    scores_BSG = scores_with_received(sources.given_BSG[:, N:], received_BSG, weights.received_G)
    return sources._replace(
        scores_BSG=torch.cat([state.kept_scores_BNG, scores_BSG], dim=1),
        received_BSG=F.pad(received_BSG, (0, 0, N, 0)),
    )


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
    received: Tensor | None = None,
    far: Far | None = None,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """Softmax attention to t - left <= s <= t, the first ``sinks`` tokens, and the ``kept`` best-scored between them.

    Shapes: q (B, T, H, K), k (B, T, G, K), v (B, T, G, V), scores s (B, T, G), H a multiple of G; ``weight`` (G), of
    scores in logits; ``received`` (G), of log attention in scores. Everything else is as in :func:`window_attention`.
    Returns y (B, T, H, V), 0 at padding; the log of the sum that normalises each query's weights (B, T, H), -1e30 at
    padding; and the :class:`KeptState`.

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
    for name, tensor in (("weight", weight), ("received", received)):
        if tensor is not None:
            axes.bind(name, tensor, "G")
    require_divides(op, sizes["G"], sizes["H"], "key/value heads", "query heads")
    for name, value, least in (("left", left, 0), ("sinks", sinks, 0), ("kept", kept, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{op}: {name} is {value!r}, expected a whole number of tokens, at least {least}")
    if far is not None:
        axes.bind("far.query", far.query_BTHK, "BTHK")
        if far.reach <= left:
            raise ValueError(f"{op}: reach is {far.reach}, expected more than left ({left})")
    tokens = require_tokens(op, tokens, q_BTHK, state)
    empty = KeptState.empty(q_BTHK, left, sinks, kept, sizes["G"], sizes["K"], sizes["V"], received is not None)
    before = _of_this_document(require_state(op, state, empty), left, tokens) if state is not None else empty
    scores_BTG = bounded(s_BTG.to(compute_dtype(s_BTG)))
    reach = Reach(left, 0, sizes["K"] ** -0.5 if scale is None else scale, softcap)
    query = q_BTHK if sink_query is None else sink_query
    weights = Weights(weight, received)
    return q_BTHK, k_BTGK, v_BTGV, scores_BTG, weights, query, far, reach, before, tokens
