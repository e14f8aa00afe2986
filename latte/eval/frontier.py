"""The frontier: gap closed and recall against the bytes of a state, for several ways to spend the same memory.

Ways, each at several numbers of tokens in sight (window, sinks and kept tokens together):
``window``: all of them in the window; ``kept``: the recipe's window, the rest kept by scores, no latents; ``latents``:
the extended model without its kept tokens; ``all together``: the extended model with as many kept tokens; ``oracle``:
as ``kept``, but chosen by the attention that each token will get in the stretch, which no score can know; ``hybrid``:
as ``kept``, with the layers that keep their attention.
The gap is that between the pretrained model on the recipe's window and sinks, and with everything in sight.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from latte.eval.stream import Text, state_bytes

WINDOW_OF, KEPT, LATENTS, TOGETHER = "window", "kept", "latents", "all together"
ORACLE, HYBRID = "oracle", "hybrid"
ORIGINAL_ROW, BASE_ROW = "original", "window and sinks"
CHUNK = 1024  # tokens read at once


def stretches(text: Text, context: int, count: int) -> list[np.ndarray]:
    """Up to ``count`` stretches of ``context`` tokens and one more: the first of each document, then the second, ..."""
    long = [document for document in text.documents if len(document) > context]
    found: list[np.ndarray] = []
    start = 0
    while len(found) < count and any(len(document) > start + context for document in long):
        found += [document[start : start + context + 1] for document in long if len(document) > start + context]
        start += context
    return found[:count]


@torch.no_grad()
def losses_of(model: Any, pieces: list[np.ndarray], chunk: int = CHUNK) -> tuple[list[float], int]:
    """Mean loss of each stretch, and the bytes of state at its end; ``chunk`` tokens are read at once."""
    found, size = [], 0
    for piece in pieces:
        ids = torch.from_numpy(piece.astype(np.int64))[None].to(model.device)
        cache, total = None, 0.0
        for start in range(0, ids.shape[1] - 1, chunk):
            part, targets = ids[:, start : start + chunk], ids[0, start + 1 : start + chunk + 1]
            output = model(input_ids=part, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits = output.logits[0, : len(targets)].float()
            total += float(F.cross_entropy(logits, targets, reduction="sum"))
        found.append(total / (ids.shape[1] - 1))
        size = state_bytes(cache)
    return found, size


def gap_closed(base: list[float], best: list[float], now: list[float]) -> dict[str, float] | None:
    """The closed part of the gap, of losses by document, and its standard error; None without a gap.

    The part is a ratio of sums; its error is that of the residuals of the documents (delta method).
    """
    gap = np.array(base) - np.array(best)
    gain = np.array(base) - np.array(now)
    if not gap.sum() > 0:
        return None
    part = float(gain.sum() / gap.sum())
    count = len(gap)
    if count < 2:
        return {"gap_closed": part}
    residual = gain - part * gap
    error = math.sqrt(count * float(residual.var(ddof=1))) / float(gap.sum())
    return {"gap_closed": part, "standard_error": error}
