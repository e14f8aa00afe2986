"""The bugs that scripts/mutants.py seeds, one at a time: what, where, the text before and after, and who notices."""

from __future__ import annotations

from typing import NamedTuple

# What to run for a family of mutants: fast tests first, since the first failure ends a run.
LATTE = ("tests/ops/test_latte.py", "tests/ops/test_forms.py", "-k", "latte")
DECAY = ("tests/ops/test_decay.py", "tests/ops/test_forms.py", "-k", "decay or document_attention")
WINDOW = ("tests/ops/test_window.py", "tests/ops/test_forms.py", "-k", "window or sinks or ring or softcap or queries")
SOFTMAX = ("tests/ops/test_window.py", "tests/ops/test_forms.py", "-k", "full_attention or softmax_attention")
SCAN = ("tests/ops/test_scan.py", "tests/ops/test_forms.py", "-k", "scan or conv")
MIXERS = ("tests/mixers/test_oracles.py",)
BOTH_WAYS = ("tests/contract", "-k", "bidirectional and packing")
PADDING = ("tests/contract", "-k", "padding or pads_say_nothing")
STATE = ("tests/test_state.py",)
STEP = ("tests/models/test_step.py", "tests/models/test_written_states.py")
#: Tests of what stands around the kernels; all others are run without them, or a kernel would hide the bug.
WITH_KERNELS = (STEP,)


class Mutant(NamedTuple):
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


GATED, LOG_KEY, DECAY_PY = "latte/ops/gated.py", "latte/ops/log_key.py", "latte/ops/decay.py"
WINDOW_PY, SCAN_PY, TOKENS = "latte/ops/window.py", "latte/ops/scan.py", "latte/ops/tokens.py"
FEEDS, MIXER = "latte/mixers/feeds.py", "latte/mixers/latte.py"
STEP_PY, PLAN, BLOCKS = "latte/models/step.py", "latte/models/plan.py", "latte/ops/native/token.py"

MUTANTS = [
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
        "segment_BT = segment_ids(reset, p_BTHM)\n    size",
        "segment_BT = segment_ids(None, p_BTHM)\n    size",
        LATTE,
    ),
    Mutant(
        "causal Latte drops resets in a step",
        LOG_KEY,
        "log_norm_BHM = torch.where(reset[:, :, None], EMPTY, log_norm_BHM)",
        "log_norm_BHM = torch.where(reset[:, :, None], log_norm_BHM, log_norm_BHM)",
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
        "torch.where(same[..., None], torch.logaddexp(k_CM, earlier), k_CM)",
        "torch.logaddexp(k_CM, earlier)",
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
        "k, v = torch.where(mask[..., None, None], k, EMPTY), torch.where(mask[..., None, None], v, 0.0)\n    # Sh",
        "v = torch.where(mask[..., None, None], v, 0.0)\n    # Sh",
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
        "segment_BT = segment_ids(reset, q)",
        "segment_BT = segment_ids(None, q)",
        DECAY,
    ),
    Mutant(
        "decay attention drops resets in a step",
        DECAY_PY,
        "torch.where(reset[:, t, None, None, None], 0.0, total_BHKV)",
        "torch.where(reset[:, t, None, None, None], total_BHKV, total_BHKV)",
        DECAY,
    ),
    Mutant(
        "padding fades the state",
        DECAY_PY,
        "gate = None if gate is None else torch.where(real, gate, 0.0)",
        "gate = None if gate is None else torch.where(real, gate, gate)",
        DECAY,
    ),
    Mutant(
        "gates are summed in float32",
        DECAY_PY,
        "gates = gates.to(wide_dtype(gates.device))",
        "gates = gates.to(q.dtype)",
        DECAY,
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
        "seen_BS = [slots_R < count_B[:, None],",
        "seen_BS = [slots_R < count_B[:, None] - 1,",
        WINDOW,
    ),
    Mutant(
        "logits in blocks are not scaled", WINDOW_PY, "_cap(q @ k * scale, softcap)", "_cap(q @ k, softcap)", WINDOW
    ),
    Mutant(
        "a step's logits are not capped",
        WINDOW_PY,
        "return _cap(logits.flatten(1, 2) * scale, softcap)",
        "return logits.flatten(1, 2) * scale",
        WINDOW,
    ),
    Mutant(
        "logits are capped before they are scaled",
        WINDOW_PY,
        "_cap(q @ k * scale, softcap)",
        "(_cap(q @ k, softcap) * scale)",
        WINDOW,
    ),
    Mutant(
        "sinks inside the window are counted twice",
        WINDOW_PY,
        "behind_BTN = sink_N < place_BT[..., None] - left",
        "behind_BTN = sink_N <= place_BT[..., None]",
        WINDOW,
    ),
    Mutant(
        "a sink on the window's edge is counted twice in a step",
        WINDOW_PY,
        "torch.arange(n_sinks, device=device) < count_B[:, None] - left",
        "torch.arange(n_sinks, device=device) <= count_B[:, None] - left",
        WINDOW,
    ),
    Mutant(
        "the query for sinks is ignored",
        WINDOW_PY,
        "sink_query = q_BTHK if sink_query is None else sink_query",
        "sink_query = q_BTHK",
        WINDOW,
    ),
    Mutant(
        "history is read from the next slot of the ring",
        WINDOW_PY,
        "place_BR = state.count_B[:, None] - left + torch.arange",
        "place_BR = state.count_B[:, None] - left + 1 + torch.arange",
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
        "segment_BT = segment_ids(reset, q_BTHK)\n    moved",
        "segment_BT = segment_ids(None, q_BTHK)\n    moved",
        WINDOW,
    ),
    Mutant(
        "a step drops resets of the window",
        WINDOW_PY,
        "torch.where(reset[:, 0], 0, state.count_B)",
        "torch.where(reset[:, 0], state.count_B, state.count_B)",
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
        "before.live_BS & (last_B1 == 0)",
        "before.live_BS & (last_B1 >= 0)",
        SOFTMAX,
    ),
    # Padding and places.
    Mutant(
        "padding is not zeroed",
        TOKENS,
        "torch.where(mask_BT.reshape(*mask_BT.shape, *([1] * (y_BT.dim() - 2))), y_BT, torch.zeros_like(y_BT))",
        "y_BT",
        PADDING,
    ),
    Mutant(
        "places count padding",
        TOKENS,
        "if mask_BT is None else mask_BT.long()",
        "if mask_BT is None else torch.ones_like(mask_BT).long()",
        PADDING,
    ),
    Mutant(
        "padding is moved to the front of the row",
        TOKENS,
        "torch.argsort((~mask_BT).to(torch.uint8)",
        "torch.argsort(mask_BT.to(torch.uint8)",
        PADDING,
    ),
    # The scan and the convolution.
    Mutant(
        "the scan drops resets",
        SCAN_PY,
        "log_a = torch.where(reset[..., None], UNSEEN, log_a)",
        "log_a = torch.where(reset[..., None], log_a, log_a)",
        SCAN,
    ),
    Mutant(
        "a scan to the left cuts documents one token late",
        SCAN_PY,
        "reset = None if reset is None else F.pad(reset[:, 1:], (0, 1)).flip(1)",
        "reset = None if reset is None else reset.flip(1)",
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
        "((place_BT >= back) | (segment_BT == 0))",
        "((place_BT >= back - 1) | (segment_BT == 0))",
        SCAN,
    ),
    Mutant(
        "the convolution's tail keeps a token too few",
        SCAN_PY,
        "device=device) <= count_B[:, None]",
        "device=device) < count_B[:, None]",
        SCAN,
    ),
    # What feeds the latents.
    Mutant(
        "the RG-LRU scales a document's first token",
        FEEDS,
        "torch.where((place_BT == 0)[..., None], torch.ones_like(scale_BTD), scale_BTD)",
        "torch.where((place_BT == 0)[..., None], scale_BTD, scale_BTD)",
        MIXERS,
    ),
    Mutant(
        "sqrt(1 - a) instead of sqrt(1 - a^2)", FEEDS, "-torch.expm1(2 * log_a_BTD)", "-torch.expm1(log_a_BTD)", MIXERS
    ),
    Mutant("the RG-LRU's gates are swapped", FEEDS, "recurrence, entry = torch", "entry, recurrence = torch", MIXERS),
    Mutant(
        "the RG-LRU's decay has another sign",
        FEEDS,
        "-GATE_POWER * F.softplus(self",
        "-GATE_POWER * F.softplus(-self",
        MIXERS,
    ),
    Mutant(
        "the feed to the left cuts documents one token late",
        FEEDS,
        "reset = None if reset is None else F.pad(reset[:, 1:], (0, 1)).flip(1)",
        "reset = None if reset is None else reset.flip(1)",
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
        "latte/mixers/layers.py",
        "x_BTGV.repeat_interleave(heads // groups, dim=2)",
        "x_BTGV.repeat(1, 1, heads // groups, 1)",
        MIXERS,
    ),
    Mutant(
        "linear attention's denominator is doubled",
        "latte/mixers/linear.py",
        "F.pad(v_BTHV, (0, 1), value=1.0)",
        "F.pad(v_BTHV, (0, 1), value=2.0)",
        MIXERS,
    ),
    Mutant("the last latent is lost to the window's slot", MIXER, "p_BTHM[..., 1:]\n", "p_BTHM[..., :-1]\n", MIXERS),
    Mutant(
        "the window reads what is fed to the latents",
        MIXER,
        "self.window(x_BTD, v_BTGV",
        "self.window(fed_BTD, v_BTGV",
        MIXERS,
    ),
    Mutant(
        "sinks are looked at from the query's own place",
        "latte/mixers/window.py",
        "place_BT.clamp(max=self.sinks + self.size)",
        "place_BT",
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
        "a state of another shape is accepted", "latte/state.py", "if tensor.shape != other.shape:", "if False:", STATE
    ),
    # One token in one native call: whose memory it writes to, and when it may not be used.
    Mutant(
        "a token takes the place of one that a state still looks at",
        STEP_PY,
        "0 <= distance < native.SPARE",
        "0 <= distance <= native.SPARE",
        STEP,
    ),
    Mutant(
        "a branch is written over the token of another",
        STEP_PY,
        "0 <= distance < native.SPARE",
        "-1 <= distance < native.SPARE",
        STEP,
    ),
    Mutant(
        "a state with a history loses it",
        STEP_PY,
        "if not any(tensor.requires_grad or tensor.is_inference() != inference",
        "if not any(tensor.is_inference() != inference",
        STEP,
    ),
    Mutant(
        "another head is not noticed",
        STEP_PY,
        "plan.body() is not body or plan.head is not head or",
        "plan.body() is not body or",
        STEP,
    ),
    Mutant(
        "a hook registered later is not noticed",
        PLAN,
        "if hooks != self.hooks:",
        "if hooks < self.hooks:",
        STEP,
    ),
    Mutant(
        "a weight is read where it was before",
        PLAN,
        "return list(map(Tensor.data_ptr, self.weights)) == self.addresses",
        "return len(self.weights) == len(self.addresses)",
        STEP,
    ),
    Mutant(
        "tokens of a ring are looked for in slots of another size",
        BLOCKS,
        'torch.arange(R, device="cpu")) % R\n',
        'torch.arange(R, device="cpu")) % (R + 1)\n',
        STEP,
    ),
]
