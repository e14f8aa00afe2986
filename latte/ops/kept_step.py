"""One token of a window that keeps tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.kept_received import received_from_one, scores_with_received
from latte.ops.kept_selection import worst_slot
from latte.ops.kept_state import Far, KeptState, Weights, take_heads
from latte.ops.numbers import EMPTY, compute_dtype, log_add
from latte.ops.window import Reach, WindowState, one_query_logits, window_attention_step
from latte.tokens import Tokens, take_tokens


def under_one_softmax(y: Tensor, log_norm: Tensor, other: Tensor, other_norm: Tensor) -> tuple[Tensor, Tensor]:
    """Means of two sets of values as the mean of both."""
    total = log_add(log_norm, other_norm)
    return (log_norm - total).exp()[..., None] * y + (other_norm - total).exp()[..., None] * other, total


def kept_attention_step(
    q_B1HK: Tensor,
    k_B1GK: Tensor,
    v_B1GV: Tensor,
    s_B1G: Tensor,
    weights: Weights,
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
    if weights.logits_G is not None:
        logits_BHN = logits_BHN + _per_query_head(weights.logits_G.to(dtype) * state.kept_scores_BNG, q_B1HK)
    logits_BHN = torch.where(_per_query_head(places_BNG >= 0, q_B1HK), logits_BHN, EMPTY)
    weights_BGRN = logits_BHN.softmax(dim=-1).unflatten(1, (G, -1))
    kept_B1HV = (weights_BGRN @ state.kept_values_BNGV.to(dtype).transpose(1, 2)).flatten(1, 2)[:, None]
    kept_norm_B1H = logits_BHN.logsumexp(dim=-1)[:, None]
    leaves = _leave_ring(q_B1HK, k_B1GK, v_B1GV, s_B1G, log_norm_B1H, weights, reach, state, tokens)
    y_B1HV, log_norm_B1H = under_one_softmax(y_B1HV, log_norm_B1H, kept_B1HV, kept_norm_B1H)
    after = _step_state(leaves, far, reach, state, places_BNG, window_after, tokens)
    return tokens.zero_padding(y_B1HV).to(v_B1GV.dtype), log_norm_B1H, after


def _per_query_head(x_BNG: Tensor, q_B1HK: Tensor) -> Tensor:
    return x_BNG.transpose(1, 2).repeat_interleave(q_B1HK.shape[2] // x_BNG.shape[2], dim=1)


class _Leaves(NamedTuple):
    """The token that leaves the window behind a query, and what stays in the ring."""

    k_B1GK: Tensor
    v_B1GV: Tensor
    s_B1G: Tensor
    ring_scores_BRG: Tensor
    ring_received_BRG: Tensor | None


def _leave_ring(
    q_B1HK: Tensor,
    k_B1GK: Tensor,
    v_B1GV: Tensor,
    s_B1G: Tensor,
    log_norm_B1H: Tensor,
    weights: Weights,
    reach: Reach,
    state: KeptState,
    tokens: Tokens,
) -> _Leaves:
    """The oldest token of the ring goes, and this one takes its place; without a window it goes itself."""
    left, real_B1, slot_B1 = reach.left, tokens.real_BT, tokens.place_BT % max(reach.left, 1)
    new_BRG = (real_B1 & (torch.arange(left, device=k_B1GK.device) == slot_B1))[..., None]
    gone: tuple[Tensor, ...] = (k_B1GK, v_B1GV, s_B1G)
    if left:
        ring = (state.window.keys_BRGK, state.window.values_BRGV, state.scores_BRG)
        gone = tuple(take_tokens(x, slot_B1) for x in ring)
    k_gone, v_gone, s_gone = gone
    received_BRG = state.received_BRG
    if weights.received_G is not None and received_BRG is not None:
        own_B1G = received_from_one(q_B1HK, k_B1GK, log_norm_B1H, real_B1, reach)
        got_B1G = own_B1G
        if left:
            seen_BR = real_B1 & (torch.arange(left, device=k_B1GK.device) < tokens.place_BT)
            received_BRG = received_BRG + received_from_one(
                q_B1HK, state.window.keys_BRGK, log_norm_B1H, seen_BR, reach
            )
            got_B1G = take_tokens(received_BRG, slot_B1)
            received_BRG = torch.where(new_BRG, own_B1G, received_BRG)
        s_gone = scores_with_received(s_gone, got_B1G, weights.received_G)
    return _Leaves(k_gone, v_gone, s_gone, torch.where(new_BRG, s_B1G, state.scores_BRG), received_BRG)


def _step_state(
    leaves: _Leaves,
    far: Far | None,
    reach: Reach,
    state: KeptState,
    places_BNG: Tensor,
    window: WindowState,
    tokens: Tokens,
) -> KeptState:
    """The state after one token."""
    left, place_B11, real_B11 = reach.left, tokens.place_BT[:, :, None], tokens.real_BT[:, :, None]
    slot_BG, least_BG = worst_slot(state.kept_scores_BNG.transpose(1, 2), places_BNG.transpose(1, 2))
    there_B11 = real_B11 & (place_B11 - left >= state.window.sink_keys_BNGK.shape[1])
    taken_B1G = there_B11 & (leaves.s_B1G > least_BG[:, None])
    slot_N1 = torch.arange(places_BNG.shape[1], device=slot_BG.device)[:, None]
    here_BNG = taken_B1G & (slot_N1 == slot_BG[:, None])
    keys_BNGK = torch.where(here_BNG[..., None], leaves.k_B1GK, state.kept_keys_BNGK)
    places_BNG = torch.where(here_BNG, place_B11 - left, places_BNG)
    if far is not None:  # at most one token a head is now one too far
        beyond_BNG = real_B11 & (places_BNG >= 0) & (place_B11 - places_BNG == far.reach)
        index_B1G = beyond_BNG.to(torch.uint8).argmax(dim=1, keepdim=True)
        back_B1GK = far.turn_back(take_heads(keys_BNGK, index_B1G), torch.gather(places_BNG, 1, index_B1G).clamp(min=0))
        keys_BNGK = torch.where(beyond_BNG[..., None], back_B1GK, keys_BNGK)
    return KeptState(
        window,
        leaves.ring_scores_BRG,
        leaves.ring_received_BRG,
        torch.where(here_BNG, leaves.s_B1G, torch.where(places_BNG < 0, EMPTY, state.kept_scores_BNG)),
        places_BNG,
        keys_BNGK,
        torch.where(here_BNG[..., None], leaves.v_B1GV, state.kept_values_BNGV),
    )
