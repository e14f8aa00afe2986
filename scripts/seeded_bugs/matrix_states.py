"""Causality, carries and documents of the matrix states: latents, decays, the delta rule, blocks of doubling size."""

from __future__ import annotations

from .mutant import DECAY, DELTA, LATTE, LOG_LINEAR, Mutant

GATED = "latte/ops/gated.py"
LOG_KEY = "latte/ops/log_key.py"
DECAY_PY = "latte/ops/decay.py"
DELTA_PY = "latte/ops/delta.py"
WY = "latte/ops/wy.py"
BONUS = "latte/ops/bonus.py"
LOG_LINEAR_PY = "latte/ops/log_linear.py"

MUTANTS = [
    # Latents and decays.
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
        "LatteState(after_BNHM[:, -1].clone(), after_BHMV)",
        "LatteState(ends_BNHM[:, -1].clone(), after_BHMV)",
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
    # Blocks of doubling size.
    Mutant(
        "levels are counted from the call's first token",
        LOG_LINEAR_PY,
        "_bit_length(place_NC ^ x.count_in_N[:, None]), 0)",
        "_bit_length(place_NC), 0)",
        LOG_LINEAR,
    ),
    Mutant(
        "blocks are not joined",
        LOG_LINEAR_PY,
        "_of_rows(below, top_B111 == i",
        "_of_rows(block, top_B111 == i",
        LOG_LINEAR,
    ),
    Mutant(
        "blocks of the past are not erased",
        LOG_LINEAR_PY,
        "else carry @ side_by_side",
        "else carry.diagonal(0, -2, -1)[..., None] * side_by_side",
        LOG_LINEAR,
    ),
    Mutant(
        "a chunk's keys do not erase one another",
        LOG_LINEAR_PY,
        "x.erase_NHCK, -x.k_NHCK, gate",
        "x.erase_NHCK, 0 * x.k_NHCK, gate",
        LOG_LINEAR,
    ),
    Mutant(
        "one token's pair is read at the wrong level",
        LOG_LINEAR_PY,
        "_bit_length(place_NC[:, :, None] ^ place_NC[:, None, :]), 0)",
        "_bit_length(place_NC[:, :, None] ^ place_NC[:, None, :]), 0).clamp(min=1)",
        LOG_LINEAR,
    ),
    Mutant(
        "tokens of a chunk that is not aligned with the tree are in every block that gets some",
        LOG_LINEAR_PY,
        "alone = occupied.added == 1 << i",
        "alone = True",
        LOG_LINEAR,
    ),
    Mutant(
        "a row joins its blocks where another row does",
        LOG_LINEAR_PY,
        "return block if known == {True} else",
        "return block if known is not None else",
        LOG_LINEAR,
    ),
]
