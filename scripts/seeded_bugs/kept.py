"""Tokens kept behind the window."""

from __future__ import annotations

from .mutant import KEPT, KEPT_FORMS, Mutant

SELECTION = "latte/ops/kept_selection.py"
KEPT_PY = "latte/ops/kept.py"
KEPT_STATE = "latte/ops/kept_state.py"
KEPT_ATTEND = "latte/ops/kept_attend.py"
KEPT_STEP = "latte/ops/kept_step.py"
RECEIVED = "latte/ops/kept_received.py"

MUTANTS = [
    Mutant(
        "a token that was pushed out comes back with the next block",
        SELECTION,
        "(held_BGN, source_BGI[..., N:]),",
        "(held_BGN, held_BGN.gather(-1, slot_BGC.clamp(max=N - 1))),",
        KEPT,
    ),
    Mutant(
        "a kept token leaves early", SELECTION, "fits_BGCI = (many_BGCI < N)", "fits_BGCI = (many_BGCI < N - 1)", KEPT
    ),
    Mutant(
        "a kept token leaves one query early",
        SELECTION,
        "last_BGI = entered_I + seen.sum(dim=2)",
        "last_BGI = entered_I + seen.sum(dim=2) - 1",
        KEPT,
    ),
    Mutant(
        "of equal scores the later is kept, in blocks",
        SELECTION,
        "better = (new > all_) | ((new == all_) & ~later_CI)",
        "better = (new > all_) | ((new == all_) & later_CI)",
        KEPT,
    ),
    Mutant(
        "of equal scores the later is kept, in a step",
        KEPT_STEP,
        "taken_B1G = there_B11 & (leaves.s_B1G > least_BG[:, None])",
        "taken_B1G = there_B11 & (leaves.s_B1G >= least_BG[:, None])",
        KEPT,
    ),
    Mutant(
        "of the worst the earliest goes",
        SELECTION,
        "slot_BG = torch.where(score_BGN == least_BG1, order_BGN, -1).argmax(dim=-1)",
        "slot_BG = torch.where(score_BGN == least_BG1, -order_BGN, torch.iinfo(order_BGN.dtype).min).argmax(dim=-1)",
        KEPT,
    ),
    Mutant(
        "a place is not capped in blocks",
        KEPT_ATTEND,
        "products = torch.where(beyond, others.unflatten(3, (-1, size)), products)",
        "products = torch.where(beyond, products, products)",
        KEPT,
    ),
    Mutant(
        "a place is not capped in a step",
        KEPT_STEP,
        "logits_BHN = torch.where(beyond_BHN, others_BHN, logits_BHN)",
        "logits_BHN = torch.where(beyond_BHN, logits_BHN, logits_BHN)",
        KEPT,
    ),
    Mutant(
        "a key that is out of reach is carried as it was",
        KEPT_STATE,
        "beyond_BNG = count_B[:, None, None] - places_BNG > far.reach",
        "beyond_BNG = count_B[:, None, None] - places_BNG > far.reach + 1",
        KEPT_FORMS,
    ),
    Mutant(
        "a score sees the future: tokens are chosen by what comes after them",
        KEPT_PY,
        "events = Events(sources.scores_BSG[:, N : N + T].detach()",
        "events = Events(sources.scores_BSG[:, N + 1 : N + T + 1].detach()",
        KEPT,
    ),
    Mutant(
        "a token is kept while the window still sees it",
        KEPT_PY,
        "there_BT = (segment_BT >= 0) & (place_BT - reach.left >=",
        "there_BT = (segment_BT >= 0) & (place_BT - reach.left + 1 >=",
        KEPT,
    ),
    Mutant(
        "sinks are kept a second time",
        KEPT_STEP,
        "there_B11 = real_B11 & (place_B11 - left >= state.window.sink_keys_BNGK.shape[1])",
        "there_B11 = real_B11 & (place_B11 - left >= 0)",
        KEPT,
    ),
    Mutant(
        "what was kept of one document is seen in the next",
        SELECTION,
        "seen = fitted & later_CI & (segment_BC[:, :, None] == segment_BI[:, None, :])[:, None]",
        "seen = fitted & later_CI & (segment_BC >= 0)[:, None, :, None]",
        KEPT,
    ),
    Mutant(
        "a state keeps what is of another document",
        KEPT_PY,
        "places_BNG = torch.where(state.kept_places_BNG < left_B11, state.kept_places_BNG, -1)",
        "places_BNG = state.kept_places_BNG",
        KEPT_FORMS,
    ),
    Mutant(
        "the scores of the ring stand in other slots",
        KEPT_STATE,
        "ring_BR = last_B1 - (last_B1 - slot_R) % max(left, 1)",
        "ring_BR = last_B1 - (last_B1 + 1 - slot_R) % max(left, 1)",
        KEPT_FORMS,
    ),
    Mutant(
        "scores do not count in the logits of a step",
        KEPT_STEP,
        "_per_query_head(weights.logits_G.to(dtype) * state.kept_scores_BNG, q_B1HK)",
        "0 * _per_query_head(weights.logits_G.to(dtype) * state.kept_scores_BNG, q_B1HK)",
        KEPT,
    ),
    Mutant(
        "a token leaves before its last query in the window has looked",
        KEPT_STEP,
        "got_B1G = take_tokens(received_BRG, slot_B1)",
        "got_B1G = take_tokens(state.received_BRG, slot_B1)",
        KEPT_FORMS,
    ),
    Mutant(
        "a token receives attention from outside of its window",
        RECEIVED,
        "seen = (place >= 0) & (place <= left) &",
        "seen = (place <= left) &",
        KEPT,
    ),
]
