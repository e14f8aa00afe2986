"""Running sums of exponentials that may fade, kept as logs: the normaliser of weights e^{k_s}.

    a_t = log(e^{a_{t-1} - w_t} + e^{k_t})        w_t >= 0

Without decay a_t = log sum_{s<=t} e^{k_s}: Latte's log alpha. e^{k_t - a_t} is the new token's share of the sum and
e^{a_{t-1} - w_t - a_t} what the past keeps, both at most 1 for any logits; they add up to 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latte.ops.log_scan import log_scan
from latte.ops.numbers import EMPTY, compute_dtype, wide_dtype
from latte.ops.registry import Draw, Example, operation
from latte.shapes import Axes
from latte.state import State, require_state, state
from latte.tokens import Tokens, require_tokens

#: The least log of what the past keeps: e to it is 0, and sums of such logs keep their digits.
FORGOTTEN = -200.0


@state
class LogSumState(State):
    """The log of the sum; float64, since after many tokens a new one hardly moves it."""

    log_norm_BD: Tensor

    @classmethod
    def empty(cls, like_BT: Tensor, width: int) -> LogSumState:
        device = like_BT.device
        return cls(torch.full((like_BT.shape[0], width), EMPTY, dtype=wide_dtype(device), device=device))


def log_sum_reference(
    k_BTD: Tensor, decay_BTD: Tensor | None, state: LogSumState, tokens: Tokens
) -> tuple[Tensor, Tensor, LogSumState]:
    """The recurrence as written, token by token."""
    k, gate = _prepare(k_BTD, decay_BTD, state, tokens)
    a_BD, upto = state.log_norm_BD, []
    for t in range(k.shape[1]):
        a_BD = torch.logaddexp(a_BD + gate[:, t], k[:, t])
        upto.append(a_BD)
    return _shares(torch.stack(upto, dim=1), k, gate, k_BTD, state, tokens)


def log_sum_chunked(
    k_BTD: Tensor, decay_BTD: Tensor | None, state: LogSumState, tokens: Tokens
) -> tuple[Tensor, Tensor, LogSumState]:
    """All runs of a row at once, then the runs' ends."""
    k, gate = _prepare(k_BTD, decay_BTD, state, tokens)
    return _shares(log_scan(gate, k, state.log_norm_BD), k, gate, k_BTD, state, tokens)


def _prepare(k: Tensor, decay: Tensor | None, state: LogSumState, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Logits and gates in the state's dtype; padding adds nothing and fades nothing, a document's start forgets all."""
    k = tokens.fill_padding(k.to(state.log_norm_BD.dtype), EMPTY)
    gate = torch.zeros_like(k) if decay is None else tokens.fill_padding(-decay.to(k.dtype), 0.0)
    return k, gate if tokens.reset is None else torch.where(tokens.reset[..., None], EMPTY, gate)


def _shares(
    a_BTD: Tensor, k: Tensor, gate: Tensor, like_BTD: Tensor, state: LogSumState, tokens: Tokens
) -> tuple[Tensor, Tensor, LogSumState]:
    before_BTD = torch.cat([state.log_norm_BD[:, None], a_BTD[:, :-1]], dim=1)
    dtype = compute_dtype(like_BTD)
    # Where nothing was added yet, k - a is the difference of two empty logs: no share.
    new_BTD = torch.where(k > EMPTY / 2, k - a_BTD, EMPTY).exp().to(dtype)
    kept_BTD = (before_BTD + gate - a_BTD).clamp(min=FORGOTTEN, max=0.0).to(dtype)
    return tokens.zero_padding(new_BTD), tokens.zero_padding(kept_BTD), LogSumState(a_BTD[:, -1].clone())


def _example(draw: Draw) -> Example:
    return (draw.normal(draw.B, draw.T, 16), draw.normal(draw.B, draw.T, 16).abs()), {}


@operation(reference=log_sum_reference, chunked=log_sum_chunked, example=_example)
def log_sum(
    k_BTD: Tensor,
    decay_BTD: Tensor | None = None,
    *,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """The recurrence above: shares e^{k_t - a_t}, logs a_{t-1} - w_t - a_t of what is kept, and a :class:`LogSumState`.

    Shapes: logits k and decay w, at least 0, (B, T, D). Computed in float64 where the device has it; both results
    (B, T, D) come in float32 or better, 0 at padding.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, or a state of something else.
    """
    axes = Axes("log_sum")
    sizes = axes.bind("k", k_BTD, "BTD")
    if decay_BTD is not None:
        axes.bind("decay", decay_BTD, "BTD")
    tokens = require_tokens("log_sum", tokens, k_BTD, state)
    before = require_state("log_sum", state, LogSumState.empty(k_BTD, sizes["D"]))
    return k_BTD, decay_BTD, before, tokens
