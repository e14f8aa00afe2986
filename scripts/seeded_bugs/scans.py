"""Scans and convolutions, elementwise: one number a channel, or a few."""

from __future__ import annotations

from .mutant import COMPLEX, CONV_KERNEL, KALMAN, LOG_SUM, MIXERS, REGISTRY, SCAN, SELECTIVE, STATE_SPACE, WKV, Mutant

SCAN_PY = "latte/ops/scan.py"
SELECTIVE_PY = "latte/ops/selective.py"
WKV_PY = "latte/ops/wkv.py"
CONV_CPP = "latte/ops/native/conv.cpp"
COMPLEX_PY = "latte/ops/complex_scan.py"
LOG_SCAN = "latte/ops/log_scan.py"
REGISTRY_PY = "latte/ops/registry.py"
RGLRU = "latte/ops/rglru.py"

MUTANTS = [
    # Normalisers that fade, Kalman filters and state-space models.
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
    # The scan and the convolution.
    Mutant(
        "the scan drops resets",
        SCAN_PY,
        "log_a = torch.where(tokens.reset[..., None], EMPTY, log_a)",
        "log_a = torch.where(tokens.reset[..., None], log_a, log_a)",
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
    Mutant(
        "the convolution's kernel keeps inputs of an earlier document",
        CONV_CPP,
        "if (g.reset && g.reset[b * g.T + t]) seen.forget(nothing);",
        "",
        CONV_KERNEL,
    ),
    Mutant(
        "the convolution's kernel counts padding",
        CONV_CPP,
        "            if (!g.mask || g.mask[b * g.T + t]) {",
        "            {",
        CONV_KERNEL,
    ),
    Mutant(
        "the gradients of a convolution's weights are those of the last block of tokens",
        CONV_CPP,
        "store_some(sum + c, load_some(sum + c, n, T(0)) + load_some(x + c, n, T(0)), n);",
        "store_some(sum + c, load_some(x + c, n, T(0)), n);",
        CONV_KERNEL,
    ),
    Mutant(
        "a long row's gradients are added up twice",
        CONV_CPP,
        "            memset(part, 0, size_t(K + 1) * bytes);\n",
        "",
        CONV_KERNEL,
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
    # The RG-LRU and rotations.
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
        "rotation turns the other way",
        "latte/ops/pointwise.py",
        "[first * cosine - second * sine, second * cosine + first * sine]",
        "[first * cosine + second * sine, second * cosine - first * sine]",
        MIXERS,
    ),
]
