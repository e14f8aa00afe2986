"""The bugs that scripts/mutants.py seeds, one at a time: what, where, the text before and after, and who notices."""

from __future__ import annotations

from typing import NamedTuple

# What to run for a family of mutants: fast tests first, since the first failure ends a run.
LATTE = ("tests/ops/test_latte.py", "tests/ops/test_forms.py", "-k", "latte")
DECAY = ("tests/ops/test_decay.py", "tests/ops/test_forms.py", "-k", "decay or document_attention")
WINDOW = ("tests/ops/test_window.py", "tests/ops/test_forms.py", "-k", "window or sinks or ring or softcap or queries")
KEPT = ("tests/ops/test_kept.py",)
KEPT_FORMS = ("tests/ops/test_kept.py", "tests/ops/test_forms.py", "-k", "kept or slot or best or events or cuts")
SOFTMAX = ("tests/ops/test_window.py", "tests/ops/test_forms.py", "-k", "full_attention or softmax_attention")
SCAN = ("tests/ops/test_scan.py", "tests/ops/test_forms.py", "-k", "scan or conv")
MIXERS = ("tests/mixers/test_oracles.py",)
BOTH_WAYS = ("tests/contract", "-k", "bidirectional and packing")
PADDING = ("tests/contract", "-k", "(padding or pads_say_nothing) and (latte or softmax)")
STATE = ("tests/test_state.py",)
TOKENS = ("tests/test_tokens.py", "-k", "not registered")
PIECES = ("tests/models/test_blocks.py", "-k", "pieces")
BLOCK = ("tests/models/test_blocks.py", "tests/mixers/test_rwkv4.py", "-k", "sublayers or cached")
UNCHANGED = ("tests/contract", "-k", "nothing_returned_is_changed")
MARKS = ("tests/contract", "-k", "marks and (rglru or mamba or rwkv or s5)")
DECAYED = ("tests/train/test_run.py", "-k", "marks_decide or weight_decay")
SELECTIVE = ("tests/ops/test_selective.py", "tests/ops/test_forms.py", "-k", "selective")
WKV = ("tests/ops/test_wkv.py", "tests/ops/test_forms.py", "-k", "wkv")
COMPLEX = ("tests/ops/test_complex_scan.py", "tests/ops/test_forms.py", "-k", "complex_scan")
DELTA = ("tests/ops/test_forms.py", "-k", "delta or bonus")
LOG_LINEAR = ("tests/ops/test_log_linear.py", "tests/ops/test_forms.py", "-k", "log_linear")
CARRIED = ("tests/mixers/test_rwkv7.py", "-k", "pieces or values")
REGISTRY = ("tests/test_tokens.py", "tests/ops", "--ignore=tests/ops/native")
STEP = ("tests/models/test_step.py", "tests/models/test_written_states.py", "tests/decode")
LOG_SUM = ("tests/ops/test_log_sum.py", "tests/ops/test_forms.py", "-k", "log_sum")
KALMAN = ("tests/mixers/test_state_spaces.py", "tests/ops/test_forms.py", "-k", "kalman")
CASCADE = ("tests/mixers/test_hla.py",)
CHUNKED = ("tests/mixers/test_mega.py",)
STATE_SPACE = ("tests/ops/test_state_space.py", "tests/ops/test_forms.py", "-k", "state_space")
LAPLACE = ("tests/ops/test_forms.py", "-k", "laplace")
LINEAR = ("tests/mixers/test_lightning.py", "tests/mixers/test_features.py")
SPARSE = ("tests/mixers/test_sla.py",)
#: Tests of what stands around the kernels; all others are run without them, or a kernel would hide the bug.
WITH_KERNELS = (STEP,)


class Mutant(NamedTuple):
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


SELECTION, KEPT_PY, KEPT_STATE, KEPT_ATTEND, KEPT_STEP, RECEIVED = (
    f"latte/ops/{name}.py"
    for name in ("kept_selection", "kept", "kept_state", "kept_attend", "kept_step", "kept_received")
)
GATED, LOG_KEY, DECAY_PY = "latte/ops/gated.py", "latte/ops/log_key.py", "latte/ops/decay.py"
WINDOW_PY, SCAN_PY, TOKENS_PY = "latte/ops/window.py", "latte/ops/scan.py", "latte/tokens.py"
SELECTIVE_PY, WKV_PY, COMPLEX_PY = "latte/ops/selective.py", "latte/ops/wkv.py", "latte/ops/complex_scan.py"
LOG_SCAN, REGISTRY_PY = "latte/ops/log_scan.py", "latte/ops/registry.py"
RGLRU, FEEDS, MIXER = "latte/ops/rglru.py", "latte/layers/feeds.py", "latte/mixers/latte.py"
DELTA_PY, WY, BONUS, LOG_LINEAR_PY = (f"latte/ops/{name}.py" for name in ("delta", "wy", "bonus", "log_linear"))
BLOCKS, MARKS_PY = "latte/models/blocks.py", "latte/layers/marks.py"
ENGINE, GUARD, MEMORY = (f"latte/decode/{name}.py" for name in ("engine", "guard", "memory"))
ATTENTION_H, LATENTS_H, RECURRENT_H = (
    f"latte/ops/native/stages_{name}.h" for name in ("attention", "latents", "recurrent")
)

MUTANTS = [
    # Normalisers that fade, Kalman filters, cascades of linear attention, and attention in chunks.
    Mutant(
        "a running log-sum gains by its decay",
        "latte/ops/log_sum.py",
        "tokens.fill_padding(-decay.to(k.dtype), 0.0)",
        "tokens.fill_padding(decay.to(k.dtype), 0.0)",
        LOG_SUM,
    ),
    Mutant(
        "what a sum keeps ignores its decay",
        "latte/ops/log_sum.py",
        "(before_BTD + gate - a_BTD)",
        "(before_BTD - a_BTD)",
        LOG_SUM,
    ),
    Mutant(
        "a filter's precision is multiplied in the wrong order",
        "latte/ops/kalman.py",
        "e * i + f * k, e * j + f * m",
        "e * i + g * j, f * i + h * j",
        KALMAN,
    ),
    Mutant(
        "a filter predicts without its process variance",
        "latte/ops/kalman.py",
        "predicted_BTDN = before_BTDN / (a_DN**2 + p_DN * before_BTDN)",
        "predicted_BTDN = before_BTDN / a_DN**2",
        KALMAN,
    ),
    Mutant(
        "the cascade composes keys from queries",
        "latte/mixers/hla.py",
        "keys = stage(k, k) if",
        "keys = stage(k, q) if",
        CASCADE,
    ),
    Mutant(
        "the stages of a cascade take their gates in the other order",
        "latte/mixers/hla.py",
        "return list(gates.chunk(self.stages, dim=-1))",
        "return list(gates.chunk(self.stages, dim=-1))[::-1]",
        CASCADE,
    ),
    Mutant(
        "a chunk of attention begins one token late",
        "latte/mixers/mega.py",
        "(tokens.place_BT % chunk == 0)",
        "(tokens.place_BT % chunk == 1)",
        CHUNKED,
    ),
    Mutant(
        "Laplace attention counts the tokens behind its query",
        "latte/mixers/mega.py",
        "count_BT = inside.count_BT\n",
        "count_BT = inside.count_BT - 1\n",
        CHUNKED,
    ),
    Mutant(
        "Laplace attention looks at keys of an earlier document",
        "latte/ops/laplace.py",
        "torch.where(state.live_BS, 0, -2)",
        "torch.where(state.live_BS, 0, 0)",
        LAPLACE,
    ),
    Mutant(
        "the state of a state-space model is read one token early",
        "latte/ops/state_space.py",
        "complex_product(complex_product(read_DNZ, first_DNZ), h_BDNZ)",
        "complex_product(read_DNZ, h_BDNZ)",
        STATE_SPACE,
    ),
    Mutant(
        "a half of a block is convolved with the taps of the other",
        "latte/ops/state_space.py",
        "n=size)[..., half:]",
        "n=size)[..., :half]",
        STATE_SPACE,
    ),
    Mutant(
        "a state-space model's last state lacks what it began with",
        "latte/ops/state_space.py",
        "(added_BDNZ + faded_BDNZ)",
        "added_BDNZ",
        STATE_SPACE,
    ),
    Mutant(
        "Lightning's layers all forget alike",
        "latte/mixers/lightning.py",
        "left = 1 - layer / (layers - 1 + 1e-5) + 1e-5",
        "left = 1.0",
        LINEAR,
    ),
    Mutant(
        "squares of Based features count twice",
        "latte/layers/taylor.py",
        "z.new_tensor(0.5).sqrt(), 1.0)",
        "z.new_tensor(1.0).sqrt(), 1.0)",
        LINEAR,
    ),
    Mutant(
        "a short document keeps as many blocks as the longest",
        "latte/layers/block_sparse.py",
        "(rank_M < wanted_R[:, None])",
        "(rank_M < rank_M.numel() + 0 * wanted_R[:, None])",
        SPARSE,
    ),
    Mutant(
        "linear attention reads what was kept",
        "latte/layers/block_sparse.py",
        "& ~kept_RHIJ.scatter(",
        "& kept_RHIJ.scatter(",
        SPARSE,
    ),
    Mutant(
        "tokens behind a document have weights in its last block",
        "latte/layers/block_sparse.py",
        "taken(real_RJC[:, None].expand(-1, H, -1, -1)) &",
        "torch.ones_like(taken(real_RJC[:, None].expand(-1, H, -1, -1))) &",
        SPARSE,
    ),
    Mutant(
        "the short branch of a long kernel is added at its far end",
        "latte/mixers/chela.py",
        "F.pad(self.near_weight, (self.options.long_size - self.options.short_size, 0))",
        "F.pad(self.near_weight, (0, self.options.long_size - self.options.short_size))",
        ("tests/mixers/test_chela.py",),
    ),
    Mutant(
        "gates of places ignore where a document begins",
        "latte/mixers/lina.py",
        "tokens.place_BT.clamp(min=0)",
        "torch.arange(tokens.length).expand(tokens.batch, -1)",
        ("tests/mixers/test_lina.py",),
    ),
    # Causality, carries and documents in the matrix-state recurrences.
    Mutant("a key sees one token of the future", GATED, ".tril()", ".tril(1)", LATTE),
    Mutant(
        "a pivot from the wrong sub-block on one side",
        GATED,
        "None, :, None], gate - pivot)",
        "None, :, None], gate - x.gate_BNHCK[..., start, None, :])",
        LATTE,
    ),
    Mutant(
        "the carry between chunks is not faded",
        GATED,
        "state_BHKV = carry_BHK[..., None] * state_BHKV + added_BHKV",
        "state_BHKV = state_BHKV + added_BHKV",
        LATTE,
    ),
    Mutant(
        "a chunk adds keys of an earlier document to its state",
        GATED,
        "kept_BN1C1 = (x.segment_BNC == last_segment_BN[..., None])",
        "kept_BN1C1 = (x.segment_BNC <= last_segment_BN[..., None])",
        DECAY,
    ),
    Mutant(
        "a token reads the state of an earlier document",
        GATED,
        "reads_BN1C1 = (x.segment_BNC == x.segment_in_BN[..., None])",
        "reads_BN1C1 = (x.segment_BNC >= x.segment_in_BN[..., None])",
        DECAY,
    ),
    Mutant(
        "causal Latte drops resets in chunks",
        LOG_KEY,
        "segment_BT = tokens.segment_BT\n    size",
        "segment_BT = torch.zeros_like(tokens.segment_BT)\n    size",
        LATTE,
    ),
    Mutant(
        "causal Latte drops resets in a step",
        LOG_KEY,
        "log_norm_BHM = torch.where(tokens.reset[:, :, None], EMPTY, log_norm_BHM)",
        "log_norm_BHM = torch.where(tokens.reset[:, :, None], log_norm_BHM, log_norm_BHM)",
        LATTE,
    ),
    Mutant(
        "causal Latte's state forgets the log-normaliser it was given",
        LOG_KEY,
        "LatteState(after_BNHM[:, -1], after_BHMV)",
        "LatteState(ends_BNHM[:, -1], after_BHMV)",
        LATTE,
    ),
    Mutant(
        "documents are misnumbered past a block of 2048 tokens",
        LOG_KEY,
        "segment_BT = segment_BT - segment[:, -1:]",
        "segment_BT = segment_BT - 0 * segment[:, -1:]",
        LATTE,
    ),
    Mutant(
        "the log-normaliser restarts nowhere",
        LOG_KEY,
        "torch.where(same[..., None], log_add(k_CM, earlier), k_CM)",
        "log_add(k_CM, earlier)",
        LATTE,
    ),
    Mutant(
        "keys on a chunk's scale reach other documents",
        LOG_KEY,
        "seen_BNCC = seen_within(x.segment_BNC).to(narrow)",
        "seen_BNCC = seen_within(0 * x.segment_BNC).to(narrow)",
        LATTE,
    ),
    Mutant(
        "a token behind a key too large for the chunk's scale stays on it",
        LOG_KEY,
        "(above_BNCHM > COMMON_RANGE).to(torch.uint8).cummax(dim=2).values.bool()",
        "above_BNCHM > COMMON_RANGE",
        LATTE,
    ),
    Mutant(
        "sums too small for the chunk's scale stay on it",
        LOG_KEY,
        "(norm_BNCHM > 0) & (norm_BNCHM < least)",
        "torch.zeros_like(high_BNCHM)",
        LATTE,
    ),
    Mutant(
        "a state too heavy for a chunk's scale stays on it",
        LOG_KEY,
        "high_BNCHM | low_BNCHM | (far_BN1HM & continues_BNC11)",
        "high_BNCHM | low_BNCHM",
        LATTE,
    ),
    Mutant(
        "a chunk adds keys of an earlier document to the latents' state",
        LOG_KEY,
        "kept_BNCHM = (x.segment_BNC == last_BN[..., None])",
        "kept_BNCHM = (x.segment_BNC <= last_BN[..., None])",
        LATTE,
    ),
    Mutant(
        "on a chunk's scale, a token reads the state of an earlier document",
        LOG_KEY,
        "(share_BNHCM @ carried_BNHMV) * continues_BNC11.transpose(2, 3)",
        "(share_BNHCM @ carried_BNHMV)",
        LATTE,
    ),
    Mutant(
        "a chunk's scale is its last key",
        LOG_KEY,
        "scale_BN1HM = x.k_BNCHM.detach().gather(2, index_BN1HM)",
        "scale_BN1HM = x.k_BNCHM.detach()[:, :, -1:]",
        LATTE,
    ),
    Mutant(
        "log-normalisers are summed in float32",
        LOG_KEY,
        "before_BNHM, after_BNHM = upto_BNHM[:, :-1], upto_BNHM[:, 1:]",
        "before_BNHM, after_BNHM = (x.to(narrow).to(wide) for x in (upto_BNHM[:, :-1], upto_BNHM[:, 1:]))",
        LATTE,
    ),
    Mutant(
        "bidirectional Latte applies the mask after the softmax",
        LOG_KEY,
        "k, v = tokens.fill_padding(k, EMPTY), tokens.fill_padding(v, 0.0)",
        "v = tokens.fill_padding(v, 0.0)",
        LATTE,
    ),
    Mutant(
        "bidirectional attention counts the own token twice",
        DECAY_PY,
        "upto + onwards.flip(1) - (q * k).sum(-1, keepdim=True) * v",
        "upto + onwards.flip(1)",
        DECAY,
    ),
    Mutant(
        "decay attention drops resets in chunks",
        DECAY_PY,
        "segment_BT = tokens.segment_BT\n    size",
        "segment_BT = torch.zeros_like(tokens.segment_BT)\n    size",
        DECAY,
    ),
    Mutant(
        "decay attention drops resets in a step",
        DECAY_PY,
        "torch.where(tokens.reset[:, t, None, None, None], 0.0, total_BHKV)",
        "torch.where(tokens.reset[:, t, None, None, None], total_BHKV, total_BHKV)",
        DECAY,
    ),
    Mutant(
        "padding fades the state",
        DECAY_PY,
        "tokens.fill_padding(gate if gate.dim() == 4 else gate[..., None], 0.0)",
        "gate if gate.dim() == 4 else gate[..., None]",
        DECAY,
    ),
    Mutant(
        "gates are summed in float32",
        DECAY_PY,
        "gates = gates.to(wide_dtype(gates.device))",
        "gates = gates.to(q.dtype)",
        DECAY,
    ),
    # Tokens kept behind the window.
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
    # The window.
    Mutant(
        "the window is one key short",
        WINDOW_PY,
        "(offset >= 0) & (offset <= left",
        "(offset > 0) & (offset <= left",
        WINDOW,
    ),
    Mutant(
        "a step's window is one key short",
        WINDOW_PY,
        "seen_BS = [torch.arange(left, device=device) < count_B1,",
        "seen_BS = [torch.arange(left, device=device) < count_B1 - 1,",
        WINDOW,
    ),
    Mutant(
        "logits in blocks are not scaled",
        WINDOW_PY,
        "scaled_and_capped(q @ k, reach)",
        "scaled_and_capped(q @ k / reach.scale, reach)",
        WINDOW,
    ),
    Mutant(
        "a step's logits are not capped",
        WINDOW_PY,
        "return scaled_and_capped((q_BGRK @ k_BSGK.to(dtype).permute(0, 2, 3, 1)).flatten(1, 2), reach)",
        "return (q_BGRK @ k_BSGK.to(dtype).permute(0, 2, 3, 1)).flatten(1, 2) * reach.scale",
        WINDOW,
    ),
    Mutant(
        "logits are capped before they are scaled",
        WINDOW_PY,
        "reach.softcap * torch.tanh(logits / reach.softcap)",
        "reach.scale * reach.softcap * torch.tanh(products / reach.softcap)",
        WINDOW,
    ),
    Mutant(
        "sinks inside the window are counted twice",
        WINDOW_PY,
        "behind_BTN = sink_N < place_BT[..., None] - reach.left",
        "behind_BTN = sink_N <= place_BT[..., None]",
        WINDOW,
    ),
    Mutant(
        "a sink on the window's edge is counted twice in a step",
        WINDOW_PY,
        "torch.arange(n_sinks, device=device) < count_B1 - left",
        "torch.arange(n_sinks, device=device) <= count_B1 - left",
        WINDOW,
    ),
    Mutant(
        "the query for sinks is ignored",
        WINDOW_PY,
        "q_BTHK if sink_query is None else sink_query, reach, before, tokens",
        "q_BTHK, reach, before, tokens",
        WINDOW,
    ),
    Mutant(
        "history is read from the next slot of the ring",
        WINDOW_PY,
        "place_BR = tokens.start_B[:, None] - left + torch.arange",
        "place_BR = tokens.start_B[:, None] - left + 1 + torch.arange",
        WINDOW,
    ),
    Mutant(
        "tokens are written to the next slot of the ring",
        WINDOW_PY,
        "ring_BR = last_B1 - (last_B1 - torch.arange(left, device=device))",
        "ring_BR = last_B1 - (last_B1 + 1 - torch.arange(left, device=device))",
        WINDOW,
    ),
    Mutant(
        "the window drops resets in blocks",
        WINDOW_PY,
        "tokens.place_BT, tokens.segment_BT, tokens.compact",
        "tokens.place_BT, torch.zeros_like(tokens.segment_BT), tokens.compact",
        WINDOW,
    ),
    Mutant(
        "a step drops resets of the window",
        WINDOW_PY,
        "torch.where(tokens.reset, 0, count_B1)",
        "torch.where(tokens.reset, count_B1, count_B1)",
        WINDOW,
    ),
    Mutant(
        "query heads are grouped in the wrong order",
        WINDOW_PY,
        "unflatten(3, (G, -1)).permute(0, 1, 3, 4, 2, 5)",
        "unflatten(3, (-1, G)).permute(0, 1, 4, 3, 2, 5)",
        WINDOW,
    ),
    Mutant(
        "full attention keeps keys of an earlier document",
        "latte/ops/softmax.py",
        "state.live_BS & (last_B1 == 0)",
        "state.live_BS & (last_B1 >= 0)",
        SOFTMAX,
    ),
    # Padding and places.
    Mutant(
        "padding is not zeroed",
        TOKENS_PY,
        "torch.where(self._aligned(self.mask, y_BT), y_BT, torch.zeros_like(y_BT))",
        "y_BT",
        PADDING,
    ),
    Mutant(
        "places count padding",
        TOKENS_PY,
        "real_BT = self.real_BT.long()",
        "real_BT = torch.ones_like(self.real_BT).long()",
        PADDING,
    ),
    Mutant(
        "padding is moved to the front of the row",
        TOKENS_PY,
        "torch.argsort((~self.mask).to(torch.uint8)",
        "torch.argsort(self.mask.to(torch.uint8)",
        PADDING,
    ),
    # What is known of the tokens.
    Mutant(
        "a document's start behind a state is taken for that of a row",
        TOKENS_PY,
        "if reset is not None and not self.continues:",
        "if reset is not None:",
        TOKENS,
    ),
    Mutant(
        "a part counts from the start of its row",
        TOKENS_PY,
        "count_B, continues = self.count_BT[:, start - 1], True",
        "count_B, continues = self.in_row_BT[:, start - 1], True",
        TOKENS,
    ),
    Mutant(
        "a part forgets the parts before it",
        TOKENS_PY,
        "count_B, continues = self.count_BT[:, start - 1], True",
        "count_B, continues = self.start_B, True",
        PIECES,
    ),
    Mutant(
        "a document's start is known to its first token only",
        TOKENS_PY,
        "torch.where(self.reset, read_BT - real_BT, 0).cummax(1).values",
        "torch.where(self.reset, read_BT - real_BT, 0)",
        TOKENS,
    ),
    Mutant(
        "a new document counts the tokens of the one that the row continued",
        TOKENS_PY,
        "torch.where(self.segment_BT == 0, self.start_B[:, None], 0)",
        "self.start_B[:, None]",
        TOKENS,
    ),
    Mutant(
        "from right to left documents are cut one token early",
        TOKENS_PY,
        "F.pad(self.reset[:, 1:], (0, 1)).flip(1)",
        "self.reset.roll(-2, 1).flip(1)",
        SCAN,
    ),
    # The scan and the convolution.
    Mutant(
        "the scan drops resets",
        SCAN_PY,
        "log_a = torch.where(tokens.reset[..., None], EMPTY, log_a)",
        "log_a = torch.where(tokens.reset[..., None], log_a, log_a)",
        SCAN,
    ),
    Mutant(
        "a scan to the left cuts documents one token late",
        TOKENS_PY,
        "F.pad(self.reset[:, 1:], (0, 1)).flip(1)",
        "self.reset.flip(1)",
        SCAN,
    ),
    Mutant(
        "the convolution's taps are in reverse order",
        SCAN_PY,
        "* weight_DK[:, K - 1 - back]",
        "* weight_DK[:, back - 1]",
        SCAN,
    ),
    Mutant(
        "the convolution looks into the document before",
        SCAN_PY,
        "torch.where((reach_BT >= back)[..., None]",
        "torch.where((reach_BT >= back - 1)[..., None]",
        SCAN,
    ),
    Mutant(
        "the convolution's tail keeps a token too few",
        SCAN_PY,
        "device=device) <= tokens.in_row_BT[:, -1:]",
        "device=device) < tokens.in_row_BT[:, -1:]",
        SCAN,
    ),
    # The scans of other mechanisms.
    Mutant(
        "padding takes time in the selective scan",
        SELECTIVE_PY,
        "return x, tokens.fill_padding(delta, 0.0), A, B, C",
        "return x, delta, A, B, C",
        SELECTIVE,
    ),
    Mutant(
        "the selective scan drops resets in blocks",
        SELECTIVE_PY,
        "state=before, tokens=tokens)",
        "state=before)",
        SELECTIVE,
    ),
    Mutant(
        "a block of the selective scan gets the state of the row",
        SELECTIVE_PY,
        "A, h_BDP, part)",
        "A, state.h_BDP, part)",
        SELECTIVE,
    ),
    Mutant(
        "WKV's bonus is dropped in blocks",
        WKV_PY,
        "torch.sigmoid(bonus + k - before_BTD)",
        "torch.sigmoid(k - before_BTD)",
        WKV,
    ),
    Mutant(
        "WKV's bonus is dropped in every form",
        WKV_PY,
        "return k_BTD, v_BTD, decay_D, bonus_D, before, tokens",
        "return k_BTD, v_BTD, decay_D, 0 * bonus_D, before, tokens",
        WKV,
    ),
    Mutant(
        "WKV reads the mean after the present token",
        WKV_PY,
        "read_BTD = torch.cat([mean_BD[:, None].to(a_BD.dtype), mean_BTD[:, :-1]], dim=1)",
        "read_BTD = mean_BTD",
        WKV,
    ),
    Mutant(
        "WKV's means are weighed by the normaliser after the present token",
        WKV_PY,
        "before_BTD = torch.cat([a_BD[:, None], a_BTD[:, :-1]], dim=1)",
        "before_BTD = a_BTD",
        WKV,
    ),
    Mutant(
        "a scan of logs fades what was just added",
        LOG_SCAN,
        "log_add(log_norm_BD + gate_BD, k_BD)",
        "log_add(log_norm_BD, k_BD) + gate_BD",
        WKV,
    ),
    Mutant(
        "a scan of logs does not fade what came before a run",
        LOG_SCAN,
        "log_add(alone_BNCD, fade_BNCD + before_BND[:, :, None])",
        "log_add(alone_BNCD, before_BND[:, :, None])",
        WKV,
    ),
    Mutant(
        "a run of the scan of logs starts behind itself",
        LOG_SCAN,
        "before_BND = torch.cat([log_norm_BD[:, None], ends_BND[:, :-1]], dim=1)",
        "before_BND = ends_BND",
        WKV,
    ),
    Mutant(
        "angles are summed over documents",
        COMPLEX_PY,
        "diagonal_scan(torch.zeros_like(theta), theta, tokens=tokens, backend=backend)",
        "diagonal_scan(torch.zeros_like(theta), theta, backend=backend, "
        "tokens=Tokens(tokens.batch, tokens.length, tokens.device, tokens.mask))",
        COMPLEX,
    ),
    Mutant(
        "padding turns",
        COMPLEX_PY,
        "diagonal_scan(torch.zeros_like(theta), theta, tokens=tokens, backend=backend)",
        "diagonal_scan(torch.zeros_like(theta), theta, backend=backend, "
        "tokens=Tokens(tokens.batch, tokens.length, tokens.device, None, tokens.reset))",
        COMPLEX,
    ),
    Mutant(
        "padding turns by a constant angle",
        COMPLEX_PY,
        "count_BT = tokens.in_row_BT[:1] if tokens.plain else tokens.in_row_BT",
        "count_BT = torch.arange(1, tokens.length + 1, device=tokens.device)[None]",
        COMPLEX,
    ),
    Mutant(
        "a state stays turned back",
        COMPLEX_PY,
        "ComplexState(complex_product(after.h_BD.unflatten(1, (P, 2)), end_BPZ))",
        "ComplexState(after.h_BD.unflatten(1, (P, 2)))",
        COMPLEX,
    ),
    Mutant(
        "the reference is the chunked form",
        REGISTRY_PY,
        'op.forms["chunked" if chosen == "torch" else chosen]',
        'op.forms["chunked" if chosen != "native" else chosen]',
        REGISTRY,
    ),
    # What feeds the latents.
    Mutant(
        "the RG-LRU scales a document's first token",
        RGLRU,
        "torch.where((tokens.place_BT == 0)[..., None], torch.ones_like(scale_BTD), scale_BTD)",
        "torch.where((tokens.place_BT == 0)[..., None], scale_BTD, scale_BTD)",
        MIXERS,
    ),
    Mutant(
        "sqrt(1 - a) instead of sqrt(1 - a^2)", RGLRU, "-torch.expm1(2 * log_a_BTD)", "-torch.expm1(log_a_BTD)", MIXERS
    ),
    Mutant("the RG-LRU's gates are swapped", RGLRU, "recurrence, entry = torch", "entry, recurrence = torch", MIXERS),
    Mutant(
        "the RG-LRU's decay has another sign",
        FEEDS,
        "GATE_POWER * F.softplus(self",
        "GATE_POWER * F.softplus(-self",
        MIXERS,
    ),
    Mutant(
        "the feed to the left cuts documents one token late",
        FEEDS,
        "back.flip(1), None, tokens.reversed)",
        "back.flip(1), None, Tokens(*back.shape[:2], back.device, tokens.reversed.mask, "
        "None if tokens.reset is None else tokens.reset.flip(1)))",
        BOTH_WAYS,
    ),
    # Mixers.
    Mutant(
        "rotation turns the other way",
        "latte/ops/pointwise.py",
        "[first * cosine - second * sine, second * cosine + first * sine]",
        "[first * cosine + second * sine, second * cosine - first * sine]",
        MIXERS,
    ),
    Mutant(
        "key/value heads are repeated in the wrong order",
        "latte/layers/linear.py",
        "x_BTGV.repeat_interleave(heads // groups, dim=2)",
        "x_BTGV.repeat(1, 1, heads // groups, 1)",
        MIXERS,
    ),
    Mutant(
        "linear attention's denominator is doubled",
        "latte/mixers/linear.py",
        "F.pad(repeat_heads(v_BTGV, heads), (0, 1), value=1.0)",
        "F.pad(repeat_heads(v_BTGV, heads), (0, 1), value=2.0)",
        MIXERS,
    ),
    Mutant("the last latent is lost to the window's slot", MIXER, "p_BTHM[..., 1:]\n", "p_BTHM[..., :-1]\n", MIXERS),
    Mutant(
        "the window reads what is fed to the latents",
        MIXER,
        "self.window(x_BTD, v_BTGV",
        "self.window(self.latent_input(x_BTD, None if state is None else state.feed, tokens)[0], v_BTGV",
        MIXERS,
    ),
    Mutant(
        "sinks are looked at from the query's own place",
        "latte/layers/window.py",
        "tokens.place_BT.clamp(max=self.sinks + self.size)",
        "tokens.place_BT",
        MIXERS,
    ),
    Mutant(
        "RetNet forgets twice as fast",
        "latte/mixers/retnet.py",
        "torch.exp2(-5 - heads)",
        "torch.exp2(-4 - heads)",
        MIXERS,
    ),
    Mutant(
        "GLA's temperature multiplies",
        "latte/mixers/gla.py",
        "/ self.options.gate_temperature",
        "* self.options.gate_temperature",
        MIXERS,
    ),
    # States.
    Mutant(
        "saving drops whole numbers",
        "latte/state.py",
        ".contiguous().clone() for name, tensor in self.tensors()}",
        ".contiguous().clone() for name, tensor in self.tensors() if tensor.is_floating_point()}",
        STATE,
    ),
    Mutant("rows are selected along the wrong axis", "latte/state.py", "index_select(0,", "index_select(-1,", STATE),
    Mutant("a fork shares memory", "latte/state.py", "self.map(torch.clone)", "self.map(torch.Tensor.detach)", STATE),
    Mutant(
        "a state of another shape is accepted",
        "latte/state.py",
        "if tensor.dim() != other.dim() or any(n not in (None, m) for n, m in zip(fixed, tensor.shape, strict=True)):",
        "if False:",
        STATE,
    ),
    Mutant(
        "every axis of a state is free",
        "latte/state.py",
        'fixed = [size if letter == "." else None for',
        "fixed = [None for",
        STATE,
    ),
    # Blocks, and marks on parameters.
    Mutant(
        "a block adds to what the mixer returned",
        BLOCKS,
        "x_BTD = x_BTD + self.dropout(change_BTD)",
        "x_BTD = change_BTD.add_(x_BTD)",
        UNCHANGED,
    ),
    Mutant(
        "the second mixer of a block gets the state of the first",
        BLOCKS,
        "sublayer(norm(x_BTD), next(before), tokens, carried)",
        "sublayer(norm(x_BTD), (states or (None,))[0], tokens, carried)",
        BLOCK,
    ),
    Mutant(
        "a cast narrows what is marked",
        MARKS_PY,
        "return tensor.to(moved.device, torch.float32) if narrow and id(tensor) in kept else moved",
        "return moved",
        MARKS,
    ),
    Mutant(
        "what is marked is narrowed and widened again",
        MARKS_PY,
        "return tensor.to(moved.device, torch.float32) if narrow",
        "return moved.float() if narrow",
        MARKS,
    ),
    Mutant(
        "weight decay is by the number of axes alone",
        MARKS_PY,
        "return parameter.dim() >= 2 if mark is None or mark.decay is None else mark.decay",
        "return parameter.dim() >= 2",
        DECAYED,
    ),
    Mutant(
        "the trainer decays what is marked",
        "latte/train/trainer.py",
        "if decays(parameter, marks.get(name))]",
        "if decays(parameter, None)]",
        DECAYED,
    ),
    # One token in one native call: its memory, when it may not be used, and its stages in C++.
    Mutant(
        "tokens are taken back whose states are gone",
        MEMORY,
        "min(self._behind, count - 1 - tokens) + tokens",
        "self._behind + tokens",
        STEP,
    ),
    Mutant(
        "tokens taken back are still counted",
        MEMORY,
        "        self.read(-tokens)\n",
        "",
        STEP,
    ),
    Mutant(
        "memory grows and forgets",
        MEMORY,
        "                after[:, :, : before.shape[2]] = before\n",
        "                pass\n",
        STEP,
    ),
    Mutant(
        "rows that have read less end early",
        MEMORY,
        "x[row] = x[row].roll(missing, dims=0)",
        "x[row] = x[row].roll(-missing, dims=0)",
        STEP,
    ),
    Mutant(
        "another head is not noticed",
        ENGINE,
        "program.body() is body and program.head is head and",
        "program.body() is body and",
        STEP,
    ),
    Mutant(
        "a refusal is forever",
        ENGINE,
        "if refused is not None and refused[1]():",
        "if refused is not None:",
        STEP,
    ),
    Mutant(
        "sums of attention keep their size under a larger score",
        ATTENTION_H,
        "total_[j] *= factor, top_[j] = top;",
        "top_[j] = top;",
        STEP,
    ),
    Mutant(
        "parts of a long row count alike",
        ATTENTION_H,
        "total += factor * one[1];",
        "total += one[1];",
        STEP,
    ),
    Mutant(
        "a key is kept one slot late",
        ATTENTION_H,
        "slot = head * m.slots + place % m.slots",
        "slot = head * m.slots + (place + 1) % m.slots",
        STEP,
    ),
    Mutant(
        "sinks move away with the text",
        ATTENTION_H,
        "place = min64(f_.place(r / f_.g.B, r % f_.g.B), s_.nearest);",
        "place = f_.place(r / f_.g.B, r % f_.g.B);",
        STEP,
    ),
    Mutant(
        "a token's share of a latent is of the sum before it",
        LATENTS_H,
        "x[i] = T(double(k[i]) - sum[i]);",
        "x[i] = T(double(k[i]) - before[i]);",
        STEP,
    ),
    Mutant(
        "a fading state forgets in steps of another head",
        "latte/ops/native/stages_matrix.h",
        "double(((const T*)s_.decay)[h])",
        "double(((const T*)s_.decay)[0])",
        STEP,
    ),
    Mutant(
        "the minimum of a block of weights is left out",
        "latte/ops/native/blocks.h",
        "to[0] = to[0] * d + m, to[1] = to[1] * d + m;",
        "to[0] = to[0] * d + m, to[1] = to[1] * d;",
        STEP,
    ),
    Mutant(
        "other blocks of weights are not noticed",
        GUARD,
        "if not all(map(operator.is_, chain.from_iterable(map(dict.values, self._buffer_dicts)), self._buffers)):",
        "if len(self._buffer_dicts) < 0:",
        STEP,
    ),
    Mutant(
        "a convolution keeps its oldest input",
        RECURRENT_H,
        "memcpy(tail, past + D, size_t(kept - D) * sizeof(T));",
        "memcpy(tail, past, size_t(kept - D) * sizeof(T));",
        STEP,
    ),
    Mutant(
        "a hook registered later is not noticed",
        GUARD,
        "if hooks != self._hooks_seen:",
        "if self._hooks_seen < 0:",
        STEP,
    ),
    Mutant(
        "a weight is read where it was before",
        GUARD,
        "return list(map(Tensor.data_ptr, self.weights)) == self._addresses",
        "return len(self.weights) == len(self._addresses)",
        STEP,
    ),
    Mutant(
        "tokens of a ring are looked for in slots of another size",
        MEMORY,
        'torch.arange(R, device="cpu")) % R\n',
        'torch.arange(R, device="cpu")) % (R + 1)\n',
        STEP,
    ),
    # The delta rule and its relatives.
    Mutant("a token erases what it writes itself", WY, "seen_NCC.tril(-1)", "seen_NCC.tril()", DELTA),
    Mutant(
        "a token's decay counts twice for what it erases",
        WY,
        "exp_where(a, reads, total - wide)",
        "exp_where(a, reads, total)",
        DELTA,
    ),
    Mutant("a chunk does not erase what it was given", WY, " + erased @ from_state,", ",", DELTA),
    Mutant(
        "what was erased later stays in the keys",
        WY,
        "k * fade + (erased @ from_values).transpose(-1, -2)",
        "k * fade",
        DELTA,
    ),
    Mutant(
        "a state passes the end of its document",
        WY,
        "(last_N1 == segment_in_N[..., None])",
        "(last_N1 == last_N1)",
        DELTA,
    ),
    Mutant(
        "a token erases into another document",
        WY,
        "(segment_NC == segment_in_N[..., None])[..., None, :, None]",
        "(segment_NC == segment_NC)[..., None, :, None]",
        DELTA,
    ),
    Mutant("a pivot inside the sub-block", WY, "gate[..., start - 1, None, :]", "gate[..., start, None, :]", DELTA),
    Mutant("a prediction is added, not subtracted", DELTA_PY, "b = -k if b is None", "b = k if b is None", DELTA),
    Mutant("a document's first token reads the one before it", BONUS, "F.pad(reads[:, 1:]", "F.pad(q[:, 1:]", DELTA),
    Mutant(
        "pieces of a row get the first piece's values",
        BLOCKS,
        "value[:, start : start + part.length]",
        "value[:, : part.length]",
        CARRIED,
    ),
    Mutant(
        "what a layer adds is not handed on",
        BLOCKS,
        "if self.causal else None, carried\n",
        "if self.causal else None, {}\n",
        CARRIED,
    ),
    # Blocks of doubling size.
    Mutant(
        "levels are counted from the call's first token",
        LOG_LINEAR_PY,
        "level_BC = _bit_length(place_BC ^ x.count_in_B[:, None])",
        "level_BC = _bit_length(place_BC)",
        LOG_LINEAR,
    ),
    Mutant(
        "blocks are not joined",
        LOG_LINEAR_PY,
        "(top_B111 == i) * below_BHKV",
        "(top_B111 == i) * block_BHKV",
        LOG_LINEAR,
    ),
    Mutant(
        "blocks of the past are not erased",
        LOG_LINEAR_PY,
        "after[i] = maps.carry @ whole_BHKV.expand",
        "after[i] = maps.carry.diagonal(0, -2, -1)[..., None] * whole_BHKV.expand",
        LOG_LINEAR,
    ),
    Mutant(
        "a chunk's keys do not erase one another",
        LOG_LINEAR_PY,
        "x.erase_BHCK, -x.k_BHCK, gate",
        "x.erase_BHCK, 0 * x.k_BHCK, gate",
        LOG_LINEAR,
    ),
    Mutant(
        "one token's pair is read at the wrong level",
        LOG_LINEAR_PY,
        "_bit_length(place_BC[:, :, None] ^ place_BC[:, None, :]), 0)",
        "_bit_length(place_BC[:, :, None] ^ place_BC[:, None, :]), 0).clamp(min=1)",
        LOG_LINEAR,
    ),
]
