"""The matrix-state recurrence with no, scalar or per-channel decay.

    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T        y_t = q_t^T S_t        g_t <= 0

g = 0 is linear attention (equation 4), a constant per head RetNet, one per token and head Mamba-2, one per channel GLA.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.backends import choose_backend, compute_dtype, exact, wide_dtype
from latte.ops.gated import (
    BLOCK,
    Chunks,
    Rows,
    chunk_size,
    gated_chunks,
    pad_tokens,
    seen_within,
    segments_before,
    to_chunks,
)
from latte.ops.tokens import segment_ids, whole_document, zero_padding
from latte.shapes import Axes, given
from latte.state import State, require_state, state


@state
class DecayState(State):
    """The faded sum of k v^T over all tokens read."""

    sum_BHKV: Tensor

    @classmethod
    def empty(cls, like_BT: Tensor, heads: int, key_width: int, value_width: int) -> DecayState:
        shape = (like_BT.shape[0], heads, key_width, value_width)
        return cls(torch.zeros(shape, dtype=compute_dtype(like_BT), device=like_BT.device))


@exact
def decay_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay: Tensor | None = None,
    *,
    state: State | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, DecayState]:
    """y_t = sum_{s<=t} (q_t . prod_{s<j<=t} e^{g_j} . k_s) v_s, equation (4) without its denominator when g = 0.

    Shapes: q and k (B, T, H, K), v (B, T, H, V); ``log_decay`` is None, (H,) for a constant per head, (B, T, H), or
    (B, T, H, K), at most 0; y (B, T, H, V), 0 at padding.

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
    axes.flags("mask", mask)
    axes.flags("reset", reset)
    before = require_state("decay_attention", state, DecayState.empty(q_BTHK, sizes["H"], sizes["K"], sizes["V"]))
    chosen = choose_backend("decay_attention", backend, q_BTHK)
    if chosen == "native" and not (backend is None and sizes["T"] == 1):
        from latte.ops import native

        y_BTHV, sum_BHKV = native.decay_attention(q_BTHK, k_BTHK, v_BTHV, log_decay, before.sum_BHKV, mask, reset)
        return y_BTHV, DecayState(sum_BHKV)
    stepwise = chosen == "reference" or (backend is None and sizes["T"] == 1)
    run = decay_attention_reference if stepwise else decay_attention_chunked
    return run(q_BTHK, k_BTHK, v_BTHV, log_decay, before, mask, reset)


@exact
def document_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    *,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """y_t = sum_s (q_t . k_s) v_s over the real tokens of t's whole document: bidirectional, with no decay.

    Shapes: q and k (B, T, H, K), v (B, T, H, V), ``segments`` (B, T); y (B, T, H, V), 0 at padding. Packed documents
    are summed from the left and from the right, so that time and memory stay linear however many there are.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, or no tokens.
    """
    axes = Axes("document_attention")
    axes.bind("q", q_BTHK, "BTHK")
    axes.bind("k", k_BTHK, "BTHK")
    axes.bind("v", v_BTHV, "BTHV")
    axes.flags("mask", mask)
    axes.ids("segments", segments)
    q, k, v, _ = _prepare(q_BTHK, k_BTHK, v_BTHV, None, mask)
    if choose_backend("document_attention", backend, q) == "reference":
        products_BHTS = torch.einsum("bthk,bshk->bhts", q, k) * whole_document(q, mask, segments)[:, None]
        y_BTHV = torch.einsum("bhts,bshv->bthv", products_BHTS, v)
    elif segments is None:
        y_BTHV = torch.einsum("bthk,bhkv->bthv", q, torch.einsum("bthk,bthv->bhkv", k, v))
    else:
        starts_BT = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
        ends_BT = F.pad(starts_BT[:, 1:], (0, 1), value=True)
        upto, _ = decay_attention(q, k, v, reset=starts_BT)
        onwards, _ = decay_attention(q.flip(1), k.flip(1), v.flip(1), reset=ends_BT.flip(1))
        y_BTHV = upto + onwards.flip(1) - (q * k).sum(-1, keepdim=True) * v
    return zero_padding(y_BTHV, mask).to(v_BTHV.dtype)


def decay_attention_step(
    q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, gate_BHK: Tensor | None, sum_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """One token: fade, add, read. ``gate`` is (B, H, K), (B, H, 1) or None."""
    if gate_BHK is not None:
        sum_BHKV = gate_BHK.exp()[..., None] * sum_BHKV
    sum_BHKV = sum_BHKV + k_BHK[..., :, None] * v_BHV[..., None, :]
    return (q_BHK[..., None, :] @ sum_BHKV)[..., 0, :], sum_BHKV


def decay_attention_reference(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay: Tensor | None,
    state: DecayState,
    mask: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, DecayState]:
    """The recurrence as written, token by token."""
    q, k, v, gate = _prepare(q_BTHK, k_BTHK, v_BTHV, log_decay, mask)
    total_BHKV = state.sum_BHKV
    outputs = []
    for t in range(q.shape[1]):
        if reset is not None:
            total_BHKV = torch.where(reset[:, t, None, None, None], 0.0, total_BHKV)
        y_BHV, total_BHKV = decay_attention_step(
            q[:, t], k[:, t], v[:, t], None if gate is None else gate[:, t], total_BHKV
        )
        outputs.append(y_BHV)
    return zero_padding(torch.stack(outputs, dim=1), mask).to(v_BTHV.dtype), DecayState(total_BHKV)


def decay_attention_chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay: Tensor | None,
    state: DecayState,
    mask: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, DecayState]:
    """The recurrence as matrix products over chunks: linear time, memory linear in T with a small constant."""
    T = q_BTHK.shape[1]
    q, k, v, gate = _prepare(q_BTHK, k_BTHK, v_BTHV, log_decay, mask)
    if gate is None:
        gate = q.new_zeros(1, 1, 1, 1).expand(*q.shape[:3], 1)
    segment_BT = segment_ids(reset, q)
    size = chunk_size(T)
    outputs = Rows(v_BTHV, v.dtype)
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
        total = gates.cumsum(dim=-2) if reset is None else seen_within(segments)[:, :, None].to(gates.dtype) @ gates
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
    return zero_padding(outputs.joined(), mask).to(v_BTHV.dtype), state


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Working dtype, a gate with a channel axis, and padding that neither fades nor adds."""
    dtype = compute_dtype(q)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if gate is not None:
        gate = gate.to(dtype) if gate.dim() == 4 else gate.to(dtype)[..., None]
    if mask is not None:
        real = mask[..., None, None]
        k, v = torch.where(real, k, 0.0), torch.where(real, v, 0.0)
        gate = None if gate is None else torch.where(real, gate, 0.0)
    return q, k, v, gate
