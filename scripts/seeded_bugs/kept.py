"""Tokens kept behind the window."""

from __future__ import annotations

from .mutant import KEPT, KEPT_FORMS, REMEMBERED, Mutant

SELECTION = "latte/ops/kept_selection.py"
KEPT_PY = "latte/ops/kept.py"
KEPT_STATE = "latte/ops/kept_state.py"
KEPT_ATTEND = "latte/ops/kept_attend.py"
KEPT_STEP = "latte/ops/kept_step.py"
RECEIVED = "latte/ops/kept_received.py"
REMEMBER = "latte/extend/remember.py"
RATE = "latte/extend/attention_rate.py"
LIFETIMES = "latte/extend/lifetimes.py"
QUESTIONS = "latte/extend/questions.py"
WINDOW_PART = "latte/layers/window.py"

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
    # What tokens are worth, and for how long.
    Mutant(
        "questions ask on average, not at most",
        REMEMBER,
        "seen = weights_BGCRS.amax(dim=3) * beyond_BCS[:, None]",
        "seen = weights_BGCRS.mean(dim=3) * beyond_BCS[:, None]",
        REMEMBERED,
    ),
    Mutant(
        "questions count as text that is asked for",
        REMEMBER,
        "    worth_BT[:, asked:] = False\n",
        "",
        REMEMBERED,
    ),
    Mutant(
        "the attention of all queries counts as that of questions",
        REMEMBER,
        "in attention_blocks(mixer, x_BTD, tokens, asked):",
        "in attention_blocks(mixer, x_BTD, tokens):",
        REMEMBERED,
    ),
    Mutant(
        "what recall is worth is fitted to attention, not to its root",
        REMEMBER,
        "target_NG = most_BTG[worth_BT].sqrt()",
        "target_NG = most_BTG[worth_BT]",
        REMEMBERED,
    ),
    Mutant(
        "a token goes when either of its two scores is low",
        WINDOW_PART,
        "torch.maximum(s_BTG, self.recall_level",
        "torch.minimum(s_BTG, self.recall_level",
        REMEMBERED,
    ),
    Mutant(
        "a lifetime does not count from the level that falls out",
        WINDOW_PART,
        "self.recall_level.to(wide) + recency_G",
        "0 * self.recall_level.to(wide) + recency_G",
        REMEMBERED,
    ),
    Mutant("lifetimes have no end", WINDOW_PART, "log_life_BTG.clamp(max=LONGEST)", "log_life_BTG", REMEMBERED),
    Mutant(
        "a level is that of one token more than the best",
        LIFETIMES,
        "torch.arange(1, len(score_NG) + 1",
        "torch.arange(2, len(score_NG) + 2",
        REMEMBERED,
    ),
    Mutant(
        "lifetimes grow with the part of better tokens",
        LIFETIMES,
        "math.log(kept / few / PLACES)",
        "math.log(kept * few / PLACES)",
        REMEMBERED,
    ),
    Mutant(
        "facts are asked for in the order in which they were told, without the last",
        QUESTIONS,
        "for nth in random.permutation(len(told)) for",
        "for nth in range(len(told) - 1) for",
        REMEMBERED,
    ),
    Mutant(
        "ages are counted from the first token",
        RATE,
        "ages_ABT[nth, :, :end] += (within_BCS * age_BCS)",
        "ages_ABT[nth, :, :end] += (within_BCS * place_BT[:, end - queries : end, None])",
        REMEMBERED,
    ),
    Mutant(
        "attention at the bound of two ages is counted in both",
        RATE,
        "(age_BCS > low) & (age_BCS <= high)",
        "(age_BCS >= low) & (age_BCS <= high)",
        REMEMBERED,
    ),
    Mutant(
        "every row gives the same tokens", RATE, "worth_N2[first % stride :: stride]", "worth_N2[::stride]", REMEMBERED
    ),
    Mutant(
        "tokens weigh alike, however many queries saw them",
        RATE,
        "weight_NA1 = (queries_NA / queries_NA.sum())[..., None]",
        "weight_NA1 = ((queries_NA > 0) / queries_NA.sum())[..., None]",
        REMEMBERED,
    ),
    Mutant(
        "scores are fitted to squares, not to a rate",
        RATE,
        "log_NAG.exp() - rate_NAG * log_NAG)",
        "(log_NAG.exp() - rate_NAG).square())",
        REMEMBERED,
    ),
    Mutant(
        "coefficients stay those of scaled inputs",
        RATE,
        "(coefficients_DG / spread_D[:, None])",
        "(coefficients_DG)",
        REMEMBERED,
    ),
]
