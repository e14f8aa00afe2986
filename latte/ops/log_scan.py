"""Running sums of exponentials, kept as their logs: the normaliser of every mechanism whose keys are logits."""

from __future__ import annotations

import torch
from torch import Tensor

from latte.ops.gated import pad_tokens
from latte.ops.numbers import EMPTY, log_add

# Tokens that are scanned one after another, all runs of a row at once.
RUN = 32


def log_scan(log_gate_BTD: Tensor, k_BTD: Tensor, log_norm_BD: Tensor) -> Tensor:
    """a_t = log(e^{g_t + a_{t-1}} + e^{k_t}), elementwise, for gates g at most 0 and any logits k.

    Shapes: (B, T, D), in the dtype wanted for a (see ``wide_dtype``); ``log_norm`` (B, D) is a before the first token,
    EMPTY if there is nothing. Returns a (B, T, D). A gate of EMPTY forgets everything, and a logit of EMPTY adds
    nothing. No sum meets the scale of a later token. Two logarithms a token.
    """
    T = k_BTD.shape[1]
    if T <= RUN:
        upto = []
        for gate_BD, k_BD in zip(log_gate_BTD.unbind(1), k_BTD.unbind(1), strict=True):
            log_norm_BD = log_add(log_norm_BD + gate_BD, k_BD)
            upto.append(log_norm_BD)
        return torch.stack(upto, dim=1)
    # Every run from nothing, then the ends of the runs one after another, then both together.
    B, extra = len(k_BTD), -T % RUN
    gate_BNCD = pad_tokens(log_gate_BTD, extra).unflatten(1, (-1, RUN))
    k_BNCD = pad_tokens(k_BTD, extra, EMPTY).unflatten(1, (-1, RUN))
    alone = log_scan(
        gate_BNCD.flatten(0, 1), k_BNCD.flatten(0, 1), torch.full_like(k_BNCD[:, :, 0].flatten(0, 1), EMPTY)
    )
    alone_BNCD, fade_BNCD = alone.unflatten(0, (B, -1)), gate_BNCD.cumsum(dim=2)
    ends_BND = log_scan(fade_BNCD[:, :, -1], alone_BNCD[:, :, -1], log_norm_BD)
    before_BND = torch.cat([log_norm_BD[:, None], ends_BND[:, :-1]], dim=1)
    return log_add(alone_BNCD, fade_BNCD + before_BND[:, :, None]).flatten(1, 2)[:, :T]
