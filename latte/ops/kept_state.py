"""What a window that keeps tokens remembers, and all tokens that a call may keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.kept_selection import Selection
from latte.ops.numbers import EMPTY, compute_dtype
from latte.ops.window import WindowState
from latte.state import State, state
from latte.tokens import Tokens, take_tokens


@state
class KeptState(State):
    """The window's state, scores of the tokens in its ring, and what is kept behind it.

    An empty slot has place -1. A key that is out of reach for the next query is stored turned back to place 0. Where
    attention received in the window counts, ``received`` is what the tokens in the ring have got so far.
    """

    window: WindowState
    scores_BRG: Tensor
    received_BRG: Tensor | None
    kept_scores_BNG: Tensor
    kept_places_BNG: Tensor
    kept_keys_BNGK: Tensor
    kept_values_BNGV: Tensor

    @classmethod
    def empty(
        cls,
        like_BT: Tensor,
        left: int,
        sinks: int,
        kept: int,
        kv_heads: int,
        key_width: int,
        value_width: int,
        received: bool = False,
    ) -> KeptState:
        B, device = like_BT.shape[0], like_BT.device
        dtype = compute_dtype(like_BT)
        return cls(
            WindowState.empty(like_BT, left, sinks, kv_heads, key_width, value_width),
            torch.zeros(B, left, kv_heads, dtype=dtype, device=device),
            torch.zeros(B, left, kv_heads, dtype=dtype, device=device) if received else None,
            torch.full((B, kept, kv_heads), EMPTY, dtype=dtype, device=device),
            torch.full((B, kept, kv_heads), -1, dtype=torch.long, device=device),
            like_BT.new_zeros(B, kept, kv_heads, key_width),
            like_BT.new_zeros(B, kept, kv_heads, value_width),
        )


class Far(NamedTuple):
    """How to look at kept tokens beyond the distances that a rotary encoding was trained on.

    Attributes:
        reach: the largest distance; a token further back is looked at as if it were this far.
        query_BTHK: the queries turned to place ``reach``.
        turn_back: of keys (B, S, G, K) that were turned by places (B, S, G), the keys as they are at place 0.
    """

    reach: int
    query_BTHK: Tensor
    turn_back: Callable[[Tensor, Tensor], Tensor]


class Weights(NamedTuple):
    """What else scores do, and what else they are made of."""

    logits_G: Tensor | None  # of scores in the logits of kept tokens
    received_G: Tensor | None  # of log attention received in the window, in scores


class Sources(NamedTuple):
    """All that may be kept: the slots before these tokens, the ring, and these tokens, in this order."""

    keys_BSGK: Tensor
    values_BSGV: Tensor
    scores_BSG: Tensor
    places_BSG: Tensor
    back_BSGK: Tensor | None  # keys turned back to place 0, where some are too far
    given_BSG: Tensor  # scores as they were given, without attention received
    received_BSG: Tensor | None = None  # attention received in the window so far


def all_sources(
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    s_BTG: Tensor,
    place_BT: Tensor,
    far: Far | None,
    state: KeptState,
    tokens: Tokens,
) -> Sources:
    left, G = state.scores_BRG.shape[1:]
    place_BR = tokens.start_B[:, None] - left + torch.arange(left, device=k_BTGK.device)
    ring = (
        take_tokens(x, place_BR % max(left, 1))
        for x in (state.window.keys_BRGK, state.window.values_BRGV, state.scores_BRG)
    )
    kept = (state.kept_keys_BNGK, state.kept_values_BNGV, state.kept_scores_BNG)
    k_BSGK, v_BSGV, s_BSG = (torch.cat(parts, dim=1) for parts in zip(kept, ring, (k_BTGK, v_BTGV, s_BTG), strict=True))
    place_BSG = torch.cat([place_BR, place_BT], dim=1)[..., None].expand(-1, -1, G)
    place_BSG = torch.cat([state.kept_places_BNG, place_BSG], dim=1)
    back_BSGK = None
    if far is not None:
        beyond_BNG = tokens.start_B[:, None, None] - state.kept_places_BNG > far.reach
        stored_BSG = F.pad(beyond_BNG, (0, 0, 0, k_BSGK.shape[1] - beyond_BNG.shape[1]))
        back_BSGK = torch.where(stored_BSG[..., None], k_BSGK, far.turn_back(k_BSGK, place_BSG.clamp(min=0)))
    return Sources(k_BSGK, v_BSGV, s_BSG, place_BSG, back_BSGK, s_BSG)


def state_after(
    sources: Sources,
    selection: Selection,
    window: WindowState,
    left: int,
    far: Far | None,
    tokens: Tokens,
) -> KeptState:
    """The state after these tokens."""
    index_BNG = selection.after_BGN.transpose(1, 2)
    empty_BNG = index_BNG < 0
    index_BNG = index_BNG.clamp(min=0)
    scores_BNG, places_BNG = (torch.gather(x, 1, index_BNG) for x in (sources.scores_BSG, sources.places_BSG))
    k_BNGK, v_BNGV = (take_heads(x, index_BNG) for x in (sources.keys_BSGK, sources.values_BSGV))
    count_B, N = tokens.count_B, index_BNG.shape[1]
    if far is not None and sources.back_BSGK is not None:
        beyond_BNG = count_B[:, None, None] - places_BNG > far.reach
        k_BNGK = torch.where(beyond_BNG[..., None], take_heads(sources.back_BSGK, index_BNG), k_BNGK)
    # The ring: the last tokens of the row, each in its slot.
    last_B1 = count_B[:, None] - 1
    slot_R = torch.arange(left, device=last_B1.device)
    ring_BR = last_B1 - (last_B1 - slot_R) % max(left, 1)
    read_B1 = tokens.read_B[:, None]
    index_BR = (N + left + read_B1 - 1 - (last_B1 - ring_BR)).clamp(min=N)

    def in_ring(x_BSG: Tensor) -> Tensor:
        return torch.where((ring_BR >= 0)[..., None], take_tokens(x_BSG, index_BR), 0.0)

    return KeptState(
        window,
        in_ring(sources.given_BSG),
        None if sources.received_BSG is None else in_ring(sources.received_BSG),
        torch.where(empty_BNG, EMPTY, scores_BNG),
        torch.where(empty_BNG, -1, places_BNG),
        torch.where(empty_BNG[..., None], 0.0, k_BNGK),
        torch.where(empty_BNG[..., None], 0.0, v_BNGV),
    )


def take_heads(x_BSGK: Tensor, index_BNG: Tensor) -> Tensor:
    """Tokens ``index`` of each row and head."""
    return torch.gather(x_BSGK, 1, index_BNG[..., None].expand(*index_BNG.shape, x_BSGK.shape[-1]))
