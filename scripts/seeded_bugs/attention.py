"""Attention over tokens: the window, softmax, Laplace weights."""

from __future__ import annotations

from .mutant import LAPLACE, SOFTMAX, STATE_SIZE, WINDOW, Mutant

WINDOW_PY = "latte/ops/window.py"

MUTANTS = [
    Mutant(
        "Laplace attention looks at keys of an earlier document",
        "latte/ops/laplace.py",
        "torch.where(state.live_BS, 0, -2)",
        "torch.where(state.live_BS, 0, 0)",
        LAPLACE,
    ),
    Mutant(
        "the window is one key short",
        WINDOW_PY,
        "(offset >= 0) & (offset <= left",
        "(offset > 0) & (offset <= left",
        WINDOW,
    ),
    Mutant(
        "the window's state holds the memory of all keys and values",
        WINDOW_PY,
        "*(x.new_empty((x.shape[0], 0, *x.shape[2:])) for x in (k_BTGK, v_BTGV))",
        "k_BTGK[:, :0], v_BTGV[:, :0]",
        STATE_SIZE,
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
]
