"""Which tokens are kept behind a window, and for which queries: whole numbers, without gradients.

Every query brings one event: after it looked, the token ``left`` before it leaves the window and asks for one of N
slots. It takes the first empty one; if there is none, the slot of the worst token in it, if it has a better score than
that. Of equal scores the later one is worse. A document's first token empties all slots before it looks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops import native
from latte.ops.numbers import EMPTY

#: Queries of a block: they look at the slots as they stand before the first one, and at the tokens that come in then.
KEPT_BLOCK = 64


class Events(NamedTuple):
    """What happens at each query, padding moved to the rows' ends.

    Attributes:
        score_BTG: scores of the tokens that leave the window.
        there_BT: whether such a token exists: it is of the query's document and no sink.
        segment_BT: documents by number, -1 at padding; 0 is the one that the slots belong to before the first query.
    """

    score_BTG: Tensor
    there_BT: Tensor
    segment_BT: Tensor


class Selection(NamedTuple):
    """For each block of C queries N + C sources, and the first and the last query of the block that see each.

    Sources 0 to N - 1 are the slots before the first query, source N + t is the token that leaves at event t.

    Attributes:
        source_BEGI, first_BEGI, last_BEGI: (B, blocks, G, N + C); a source that nobody sees has ``last`` < ``first``.
        after_BGN: the sources in the slots after the last query, -1 where a slot is empty.
    """

    source_BEGI: Tensor
    first_BEGI: Tensor
    last_BEGI: Tensor
    after_BGN: Tensor


def worst_slot(score_BGN: Tensor, place_BGN: Tensor) -> tuple[Tensor, Tensor]:
    """The slot that the next token takes, (B, G), and the score that it has to exceed, EMPTY for an empty slot."""
    slots = place_BGN.shape[-1]
    empty_BGN = place_BGN < 0
    score_BGN = torch.where(empty_BGN, EMPTY, score_BGN)
    least_BG1 = score_BGN.amin(dim=-1, keepdim=True)
    # Of the worst the latest; of the empty ones, which stand above all places, the first.
    above = torch.iinfo(place_BGN.dtype).max - torch.arange(slots, device=place_BGN.device)
    order_BGN = torch.where(empty_BGN, above, place_BGN)
    slot_BG = torch.where(score_BGN == least_BG1, order_BGN, -1).argmax(dim=-1)
    return slot_BG, least_BG1[..., 0]


def select_reference(score_BGN: Tensor, place_BGN: Tensor, events: Events) -> Selection:
    """The rule as written, event by event; a block holds one query."""
    N, T = score_BGN.shape[-1], events.segment_BT.shape[1]
    held_BGN = torch.where(place_BGN < 0, -1, torch.arange(N, device=score_BGN.device))
    # Later than every slot's place, and in order.
    base_B11 = place_BGN.flatten(1).amax(dim=1)[:, None, None].clamp(min=0) + 1
    segment_B = torch.zeros_like(events.segment_BT[:, 0])
    seen = []
    for t in range(T):
        begins_B = events.segment_BT[:, t] > segment_B
        segment_B = torch.where(begins_B, events.segment_BT[:, t], segment_B)
        held_BGN = torch.where(begins_B[:, None, None], -1, held_BGN)
        place_BGN = torch.where(begins_B[:, None, None], -1, place_BGN)
        seen.append(torch.where((events.segment_BT[:, t] < 0)[:, None, None], -1, held_BGN))
        slot_BG, least_BG = worst_slot(score_BGN, place_BGN)
        taken_BG = events.there_BT[:, t, None] & (events.score_BTG[:, t] > least_BG)
        here_BGN = taken_BG[..., None] & (torch.arange(N, device=slot_BG.device) == slot_BG[..., None])
        held_BGN = torch.where(here_BGN, N + t, held_BGN)
        score_BGN = torch.where(here_BGN, events.score_BTG[:, t, :, None], score_BGN)
        place_BGN = torch.where(here_BGN, base_B11 + t, place_BGN)
    source_BTGN = torch.stack(seen, dim=1)
    none = torch.zeros_like(source_BTGN)
    return Selection(source_BTGN.clamp(min=0), none, torch.where(source_BTGN < 0, -1, none), held_BGN)


def select_blocked(score_BGN: Tensor, place_BGN: Tensor, events: Events, size: int = KEPT_BLOCK) -> Selection:
    """All events of a block at once: a token goes at the event at which N better ones of its document have come.

    A token that is better than one in a slot is in a slot too, so comparing with slots and new tokens is enough:
    (N + C) C comparisons a block.
    """
    B, G, N = score_BGN.shape
    T, device = events.segment_BT.shape[1], score_BGN.device
    extra = -T % size
    score_BTG = F.pad(events.score_BTG, (0, 0, 0, extra))
    there_BT = F.pad(events.there_BT, (0, extra))
    segment_BT = F.pad(events.segment_BT, (0, extra), value=-1)
    held_BGN = torch.where(place_BGN < 0, -1, torch.arange(N, device=device))
    segment_B = torch.zeros_like(events.segment_BT[:, 0])
    query_C = torch.arange(size, device=device)
    entered_I = torch.cat([torch.full((N,), -1, device=device), query_C])
    sources, lasts = [], []
    for start in range(0, T + extra, size):
        block = slice(start, start + size)
        new_BGC, there_BC, segment_BC = score_BTG[:, block].transpose(1, 2), there_BT[:, block], segment_BT[:, block]
        source_BGI = torch.cat([held_BGN, (N + start + query_C).expand(B, G, -1)], dim=-1)
        score_BGI = torch.cat([torch.where(held_BGN < 0, EMPTY, score_BGN), new_BGC], dim=-1)
        segment_BI = torch.cat([segment_B[:, None].expand(-1, N), segment_BC], dim=1)
        real_BGI = torch.cat([held_BGN >= 0, there_BC[:, None].expand(-1, G, -1)], dim=-1)

        # How many better ones of the same document have come up to each event: (B, G, C, I).
        later_CI = query_C[:, None] > entered_I
        new, all_ = new_BGC[..., None], score_BGI[..., None, :]
        better = (new > all_) | ((new == all_) & ~later_CI)
        better &= (there_BC[:, :, None] & (segment_BC[:, :, None] == segment_BI[:, None, :]))[:, None]
        better &= query_C[:, None] != entered_I
        before_BGI = _better_slots(score_BGN, place_BGN, held_BGN, new_BGC)
        before_BGI = torch.where((segment_BI == segment_B[:, None])[:, None], before_BGI, 0)
        many_BGCI = better.cumsum(dim=2, dtype=torch.int32) + before_BGI[..., None, :]
        fits_BGCI = (many_BGCI < N) & real_BGI[..., None, :]
        # A query sees what fitted before its own event.
        fitted = torch.cat([real_BGI[..., None, :] & (entered_I < 0), fits_BGCI[..., :-1, :]], dim=2)
        seen = fitted & later_CI & (segment_BC[:, :, None] == segment_BI[:, None, :])[:, None]
        last_BGI = entered_I + seen.sum(dim=2)
        sources.append(source_BGI.clamp(min=0, max=N + T - 1))
        lasts.append(last_BGI)

        end_B = torch.maximum(segment_B, segment_BC.amax(dim=1))
        slot_BGC = _slots(fitted & ~fits_BGCI & later_CI, held_BGN, there_BC, segment_BC, segment_B)
        stays_BGI = fits_BGCI[..., -1, :] & (segment_BI == end_B[:, None])[:, None]
        held_BGN, score_BGN, place_BGN = (
            torch.where((end_B > segment_B)[:, None, None], blank, x)
            for x, blank in ((held_BGN, -1), (score_BGN, EMPTY), (place_BGN, -1))
        )
        # What does not stay goes to a slot behind the last, which is dropped.
        to_BGC = torch.where(stays_BGI[..., N:], slot_BGC, N)
        held_BGN, score_BGN, place_BGN = (
            F.pad(x, (0, 1)).scatter(-1, to_BGC, y.to(x.dtype))[..., :N]
            for x, y in (
                (held_BGN, source_BGI[..., N:]),
                (score_BGN, new_BGC),
                (place_BGN, (_LATE + start + query_C).expand(B, G, -1)),
            )
        )
        segment_B = end_B
    first = (entered_I + 1).expand(B, len(sources), G, -1)
    return Selection(torch.stack(sources, dim=1), first, torch.stack(lasts, dim=1), held_BGN)


#: Places of newcomers, here: behind all that a state holds. Only their order counts.
_LATE = 2**40


def select_native(score_BGN: Tensor, place_BGN: Tensor, events: Events, size: int = KEPT_BLOCK) -> Selection:
    """Event by event, in C++."""
    source, last, after = native.kept_select(
        score_BGN, place_BGN, events.score_BTG, events.there_BT, events.segment_BT, size
    )
    N = score_BGN.shape[-1]
    first_I = torch.cat([torch.zeros(N, dtype=torch.long), torch.arange(1, size + 1)])
    return Selection(source, first_I.expand(source.shape), last, after)


def _better_slots(score_BGN: Tensor, place_BGN: Tensor, held_BGN: Tensor, new_BGC: Tensor) -> Tensor:
    """How many tokens in slots are better than each token in a slot and each newcomer: (B, G, N + C)."""
    score_BGN = torch.where(held_BGN < 0, 2 * EMPTY, score_BGN)  # below the score of every token
    by_place = torch.where(held_BGN < 0, torch.iinfo(place_BGN.dtype).max, place_BGN).argsort(dim=-1)
    ranked = score_BGN.gather(-1, by_place).argsort(dim=-1, descending=True, stable=True)
    order_BGN = by_place.gather(-1, ranked)
    rank_BGN = order_BGN.argsort(dim=-1)
    above_BGC = (score_BGN[..., None, :] >= new_BGC[..., None]).sum(dim=-1)
    return torch.cat([rank_BGN, above_BGC], dim=-1)


def _slots(goes_BGCI: Tensor, held_BGN: Tensor, there_BC: Tensor, segment_BC: Tensor, segment_B: Tensor) -> Tensor:
    """The slot that each newcomer gets: the next empty one, or that of the token that goes at its event."""
    C, N = there_BC.shape[1], held_BGN.shape[-1]
    query_C = torch.arange(C, device=held_BGN.device)
    slot_BGN = torch.arange(N, device=held_BGN.device).expand_as(held_BGN)
    came_BC = ((segment_BC[:, :, None] == segment_BC[:, None, :]).tril(-1) & there_BC[:, None, :]).sum(dim=-1)
    held_BG1 = (held_BGN >= 0).sum(dim=-1, keepdim=True)
    next_BGC = came_BC[:, None] + torch.where((segment_BC == segment_B[:, None])[:, None], held_BG1, 0)
    slot_BGI = torch.cat([slot_BGN, next_BGC.clamp(max=N)], dim=-1)
    # A newcomer may take the slot of another newcomer: follow them to the first.
    from_BGC = torch.where(goes_BGCI.any(dim=-1), goes_BGCI.to(torch.uint8).argmax(dim=-1), N + query_C)
    from_BGI = torch.cat([slot_BGN, from_BGC], dim=-1)
    for _ in range(C.bit_length()):
        from_BGI = from_BGI.gather(-1, from_BGI)
    return slot_BGI.gather(-1, from_BGI)[..., N:]
