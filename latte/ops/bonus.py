"""Attention with decay that reads the past before it is written, and adds the present with a bonus (RWKV-5 and 6).

y_t = q_t^T (S_{t-1} + diag(u) k_t v_t^T)        S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T        g_t <= 0
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.decay import DecayState, decay_attention
from latte.ops.numbers import compute_dtype
from latte.ops.registry import Draw, Example, operation
from latte.shapes import Axes
from latte.state import State, require_state
from latte.tokens import Tokens, require_tokens


def bonus_attention_reference(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    bonus_HK: Tensor,
    state: DecayState,
    tokens: Tokens,
) -> tuple[Tensor, DecayState]:
    """The recurrence as written, token by token."""
    q, k, v, gate, bonus = _prepare(q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, bonus_HK, tokens)
    total_BHKV = state.sum_BHKV
    outputs = []
    for t in range(q.shape[1]):
        if tokens.reset is not None:
            total_BHKV = torch.where(tokens.reset[:, t, None, None, None], 0.0, total_BHKV)
        own_BHKV = k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append((q[:, t, :, None, :] @ (total_BHKV + bonus[..., None] * own_BHKV))[..., 0, :])
        total_BHKV = gate[:, t].exp()[..., None] * total_BHKV + own_BHKV
    return tokens.zero_padding(torch.stack(outputs, dim=1)).to(v_BTHV.dtype), DecayState(total_BHKV)


def bonus_attention_chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    bonus_HK: Tensor,
    state: DecayState,
    tokens: Tokens,
) -> tuple[Tensor, DecayState]:
    """``decay_attention`` with the next token's query: what it reads after a token is what the next reads before."""
    return _shifted(q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, bonus_HK, state, tokens, "torch")


def _native(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    bonus_HK: Tensor,
    state: DecayState,
    tokens: Tokens,
) -> tuple[Tensor, DecayState]:
    return _shifted(q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, bonus_HK, state, tokens, "native")


def _shifted(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, bonus: Tensor, state: DecayState, tokens: Tokens, backend: str
) -> tuple[Tensor, DecayState]:
    dtype = v.dtype
    q, k, v, gate, bonus = _prepare(q, k, v, gate, bonus, tokens)
    # A document's first token reads nothing of the past.
    reads = q if tokens.reset is None else torch.where(tokens.reset[..., None, None], 0.0, q)
    # Padding neither fades nor adds, so it needs no mask here. With one, its output would be 0, which is what a token
    # behind it would read.
    columns = Tokens(tokens.batch, tokens.length, tokens.device, None, tokens.reset, continues=True)
    ahead = F.pad(reads[:, 1:], (0, 0, 0, 0, 0, 1))
    read_BTHV, after = decay_attention(ahead, k, v, gate, state=state, tokens=columns, backend=backend)
    first_B1HV = (reads[:, 0, :, None, :] @ state.sum_BHKV).transpose(1, 2)
    y_BTHV = torch.cat([first_B1HV, read_BTHV[:, :-1]], dim=1) + (q * bonus * k).sum(-1, keepdim=True) * v
    return tokens.zero_padding(y_BTHV).to(dtype), after


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, bonus: Tensor, tokens: Tokens
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Working dtype, and padding that neither reads, fades nor adds."""
    dtype = compute_dtype(q)
    q, k, v, gate = (tokens.fill_padding(x.to(dtype), 0.0) for x in (q, k, v, gate))
    return q, k, v, gate, bonus.to(dtype)


def _example(draw: Draw) -> Example:
    B, T, H, K, V = draw.B, draw.T, 4, 16, 24
    q, k, v, gate = (draw.normal(B, T, H, width) for width in (K, K, V, K))
    return (q, k, v, -gate.abs(), draw.normal(H, K)), {}


@operation(
    reference=bonus_attention_reference,
    chunked=bonus_attention_chunked,
    step=bonus_attention_reference,
    native=_native,
    example=_example,
)
def bonus_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTHK: Tensor,
    bonus_HK: Tensor,
    *,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """y_t = q_t^T (S_{t-1} + diag(u) k_t v_t^T) with the decayed sum S of ``decay_attention``: read, then write.

    Shapes: q, k and log_decay (at most 0) (B, T, H, K), v (B, T, H, V), bonus u (H, K). Returns y (B, T, H, V), 0 at
    padding, and the :class:`DecayState` after these tokens.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, or a state of something else.
    """
    axes = Axes("bonus_attention")
    axes.bind("q", q_BTHK, "BTHK")
    axes.bind("k", k_BTHK, "BTHK")
    axes.bind("v", v_BTHV, "BTHV")
    axes.bind("log_decay", log_decay_BTHK, "BTHK")
    sizes = axes.bind("bonus", bonus_HK, "HK")
    tokens = require_tokens("bonus_attention", tokens, q_BTHK, state)
    before = require_state("bonus_attention", state, DecayState.empty(q_BTHK, sizes["H"], sizes["K"], sizes["V"]))
    return q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, bonus_HK, before, tokens
