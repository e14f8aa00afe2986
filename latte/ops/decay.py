"""The matrix-state recurrence with no, scalar or per-channel decay.

    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T        y_t = q_t^T S_t        g_t <= 0

g = 0 is linear attention (equation 4), a constant per head RetNet, one per token and head Mamba-2, one per channel GLA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latte.ops import native
from latte.ops.gated import (
    BLOCK,
    Chunks,
    Outputs,
    chunk_size,
    gated_chunks,
    pad_tokens,
    seen_within,
    segments_before,
    to_chunks,
)
from latte.ops.nonfinite import contained
from latte.ops.numbers import FORGET, compute_dtype, wide_dtype
from latte.ops.registry import Draw, Example, operation
from latte.shapes import Axes, given
from latte.state import State, require_state, state
from latte.tokens import Tokens, require_tokens


@state
class DecayState(State):
    """The faded sum of k v^T over all tokens read."""

    sum_BHKV: Tensor

    @classmethod
    def empty(cls, like_BT: Tensor, heads: int, key_width: int, value_width: int) -> DecayState:
        shape = (like_BT.shape[0], heads, key_width, value_width)
        return cls(torch.zeros(shape, dtype=compute_dtype(like_BT), device=like_BT.device))


def decay_attention_reference(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, log_decay: Tensor | None, state: DecayState, tokens: Tokens
) -> tuple[Tensor, DecayState]:
    """The recurrence as written, token by token."""
    q, k, v, gate = _prepare(q_BTHK, k_BTHK, v_BTHV, log_decay, tokens)
    total_BHKV = state.sum_BHKV
    outputs = []
    for t in range(q.shape[1]):
        if tokens.reset is not None:
            total_BHKV = torch.where(tokens.reset[:, t, None, None, None], 0.0, total_BHKV)
        if gate is not None:
            total_BHKV = gate[:, t].exp()[..., None] * total_BHKV
        total_BHKV = total_BHKV + k[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append((q[:, t, :, None, :] @ total_BHKV)[..., 0, :])
    return tokens.zero_padding(torch.stack(outputs, dim=1)).to(v_BTHV.dtype), DecayState(total_BHKV)


@contained(numbers=(1, 2), logits=(3,))
def decay_attention_chunked(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, log_decay: Tensor | None, state: DecayState, tokens: Tokens
) -> tuple[Tensor, DecayState]:
    """The recurrence as matrix products over chunks: linear time, memory linear in T with a small constant."""
    T = q_BTHK.shape[1]
    q, k, v, gate = _prepare(q_BTHK, k_BTHK, v_BTHV, log_decay, tokens)
    if gate is None:
        gate = q.new_zeros(1, 1, 1, 1).expand(*q.shape[:3], 1)
    segment_BT = tokens.segment_BT
    size = chunk_size(T)
    outputs = Outputs(v_BTHV, v.dtype)
    for start in range(0, T, BLOCK):
        block = slice(start, min(start + BLOCK, T))
        extra = -(block.stop - block.start) % size
        segment = segment_BT[:, block]
        segment = torch.cat([segment, segment[:, -1:].expand(-1, extra)], dim=1)
        qs, ks, vs, gates = (to_chunks(pad_tokens(x[:, block], extra), size) for x in (q, k, v, gate))
        # Summed within each chunk alone, in float64: a sum of many or strong gates would lose the digits that its
        # differences need. And within each document alone: no gradient passes a boundary, not even as rounding.
        gates = gates.to(wide_dtype(gates.device))
        segments = to_chunks(segment, size)
        total = (
            gates.cumsum(dim=-2) if tokens.reset is None else seen_within(segments)[:, :, None].to(gates.dtype) @ gates
        )
        chunks = Chunks(
            qs,
            ks,
            vs,
            total,
            torch.zeros_like(total[..., 0, :]),
            total[..., -1, :],
            segments,
            segments_before(segments),
        )
        y_BNHCV, sum_BHKV = gated_chunks(chunks, state.sum_BHKV)
        state = DecayState(sum_BHKV)
        # The state now belongs to the last token's document: number documents from there.
        segment_BT = segment_BT - segment[:, -1:]
        outputs.append(y_BNHCV, block.stop - block.start)
    return tokens.zero_padding(outputs.joined()).to(v_BTHV.dtype), state


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, tokens: Tokens
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Working dtype, a gate with a channel axis, and padding that neither fades nor adds."""
    dtype = compute_dtype(q)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if gate is not None:
        gate = gate.to(dtype).clamp_min(FORGET)
        gate = tokens.fill_padding(gate if gate.dim() == 4 else gate[..., None], 0.0)
    return q, tokens.fill_padding(k, 0.0), tokens.fill_padding(v, 0.0), gate


def _native(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, log_decay: Tensor | None, state: DecayState, tokens: Tokens
) -> tuple[Tensor, DecayState]:
    flags = (tokens.mask, tokens.reset)
    y_BTHV, sum_BHKV = native.decay_attention(q_BTHK, k_BTHK, v_BTHV, log_decay, state.sum_BHKV, *flags)
    return y_BTHV, DecayState(sum_BHKV)


def _example(draw: Draw) -> Example:
    B, T, H, K, V = draw.B, draw.T, 4, 16, 24
    q, k, v, gate = (draw.normal(B, T, H, width) for width in (K, K, V, K))
    return (q, k, v, -gate.abs()), {}


@operation(
    reference=decay_attention_reference,
    chunked=decay_attention_chunked,
    step=decay_attention_reference,
    native=_native,
    example=_example,
)
def decay_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay: Tensor | None = None,
    *,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """y_t = sum_{s<=t} (q_t . prod_{s<j<=t} e^{g_j} . k_s) v_s, equation (4) without its denominator when g = 0.

    Shapes: q and k (B, T, H, K), v (B, T, H, V); ``log_decay`` is None, (H,) for a constant per head, (B, T, H), or
    (B, T, H, K), at most 0. Returns y (B, T, H, V), 0 at padding, and the :class:`DecayState` after these tokens.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, or a state of something else.
    """
    axes = Axes("decay_attention")
    axes.bind("q", q_BTHK, "BTHK")
    axes.bind("k", k_BTHK, "BTHK")
    sizes = axes.bind("v", v_BTHV, "BTHV")
    if log_decay is not None:
        letters = {1: "H", 3: "BTH", 4: "BTHK"}.get(log_decay.dim())
        if letters is None:
            raise ValueError(
                f"decay_attention: log_decay has shape {given(log_decay)}, expected (H,), (B, T, H) or (B, T, H, K)"
            )
        axes.bind("log_decay", log_decay, letters)
        if log_decay.dim() == 1:
            log_decay = log_decay.expand(sizes["B"], sizes["T"], sizes["H"])
    tokens = require_tokens("decay_attention", tokens, q_BTHK, state)
    before = require_state("decay_attention", state, DecayState.empty(q_BTHK, sizes["H"], sizes["K"], sizes["V"]))
    return q_BTHK, k_BTHK, v_BTHV, log_decay, before, tokens


def document_attention_reference(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, tokens: Tokens) -> Tensor:
    """All pairs of tokens of a document. Quadratic."""
    q, k, v, _ = _prepare(q_BTHK, k_BTHK, v_BTHV, None, tokens)
    products_BHTS = torch.einsum("bthk,bshk->bhts", q, k) * tokens.seen_BTS(causal=False)[:, None]
    y_BTHV = torch.einsum("bhts,bshv->bthv", products_BHTS, v)
    return tokens.zero_padding(y_BTHV).to(v_BTHV.dtype)


def document_attention_chunked(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, tokens: Tokens) -> Tensor:
    """One sum for a whole row; packed documents are summed from the left and from the right, in linear time."""
    q, k, v, _ = _prepare(q_BTHK, k_BTHK, v_BTHV, None, tokens)
    if tokens.reset is None:
        y_BTHV = torch.einsum("bthk,bhkv->bthv", q, torch.einsum("bthk,bthv->bhkv", k, v))
    else:
        upto, _ = decay_attention(q, k, v, tokens=tokens)
        onwards, _ = decay_attention(q.flip(1), k.flip(1), v.flip(1), tokens=tokens.reversed)
        y_BTHV = upto + onwards.flip(1) - (q * k).sum(-1, keepdim=True) * v
    return tokens.zero_padding(y_BTHV).to(v_BTHV.dtype)


def _document_example(draw: Draw) -> Example:
    return _example(draw)[0][:3], {}


@operation(reference=document_attention_reference, chunked=document_attention_chunked, example=_document_example)
def document_attention(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, *, tokens: Tokens | None = None
) -> tuple[Any, ...]:
    """y_t = sum_s (q_t . k_s) v_s over the real tokens of t's whole document: bidirectional, with no decay.

    Shapes: q and k (B, T, H, K), v (B, T, H, V). Returns y (B, T, H, V), 0 at padding.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, or no tokens.
    """
    axes = Axes("document_attention")
    axes.bind("q", q_BTHK, "BTHK")
    axes.bind("k", k_BTHK, "BTHK")
    axes.bind("v", v_BTHV, "BTHV")
    return q_BTHK, k_BTHK, v_BTHV, require_tokens("document_attention", tokens, q_BTHK)
