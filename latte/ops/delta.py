"""The delta rule with no, scalar or per-channel decay: a matrix state in which a token replaces what its key reads.

    S_t = diag(e^{g_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T        y_t = q_t^T S_t        g_t <= 0

With b = -k it writes the error of a prediction, S_t = diag(e^{g_t}) S_{t-1} + k_t (v_t - S_{t-1}^T a_t)^T:

    DeltaNet          k = beta k'     a = k'            g = 0
    Gated DeltaNet    k = beta k'     a = e^{g} k'      one g per head
    KDA               k = beta k'     a = e^{g} . k'    one g per channel
    RWKV-7            a = -k'         b = eta . k'      one g per channel

with k' of length 1, or the product of transitions grows without bound. b = a = 0 is ``decay_attention``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latte.ops import native
from latte.ops.gated import chunk_size, from_chunks, pad_tokens, segments_before, to_chunks
from latte.ops.nonfinite import contained
from latte.ops.numbers import FORGET, compute_dtype
from latte.ops.recompute import recomputed
from latte.ops.registry import Draw, Example, operation
from latte.ops.wy import chunk_maps
from latte.shapes import Axes, given
from latte.state import State, require_state, state
from latte.tokens import Tokens, require_tokens

# Tokens whose chunks are worked on at once, and recomputed for gradients: bounds scratch memory, whatever the length.
BLOCK = 1024


@state
class DeltaState(State):
    """The matrix that maps keys to values."""

    map_BHKV: Tensor

    @classmethod
    def empty(cls, like_BT: Tensor, heads: int, key_width: int, value_width: int) -> DeltaState:
        shape = (like_BT.shape[0], heads, key_width, value_width)
        return cls(torch.zeros(shape, dtype=compute_dtype(like_BT), device=like_BT.device))


def delta_attention_reference(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    a_BTHK: Tensor,
    b_BTHK: Tensor | None,
    log_decay: Tensor | None,
    state: DeltaState,
    tokens: Tokens,
) -> tuple[Tensor, DeltaState]:
    """The recurrence as written, token by token."""
    q, k, v, a, b, gate = prepare(q_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTHK, log_decay, tokens)
    map_BHKV = state.map_BHKV
    outputs = []
    for t in range(q.shape[1]):
        if tokens.reset is not None:
            map_BHKV = torch.where(tokens.reset[:, t, None, None, None], 0.0, map_BHKV)
        read_BH1V = a[:, t, :, None, :] @ map_BHKV
        written = b[:, t, :, :, None] * read_BH1V + k[:, t, :, :, None] * v[:, t, :, None, :]
        map_BHKV = gate[:, t].exp()[..., None] * map_BHKV + written
        outputs.append((q[:, t, :, None, :] @ map_BHKV)[..., 0, :])
    return tokens.zero_padding(torch.stack(outputs, dim=1)).to(v_BTHV.dtype), DeltaState(map_BHKV)


@contained(numbers=(1, 2, 3, 4), logits=(5,))
def delta_attention_chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    a_BTHK: Tensor,
    b_BTHK: Tensor | None,
    log_decay: Tensor | None,
    state: DeltaState,
    tokens: Tokens,
) -> tuple[Tensor, DeltaState]:
    """Matrix products over chunks and one triangular solve for each: linear time, memory as for one block."""
    T = q_BTHK.shape[1]
    inputs = prepare(q_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTHK, log_decay, tokens)
    size = chunk_size(T)
    map_BHKV, segment_BT = state.map_BHKV, tokens.segment_BT
    outputs = []
    for start in range(0, T, BLOCK):
        block = slice(start, min(start + BLOCK, T))
        extra = -(block.stop - block.start) % size
        segment = segment_BT[:, block]
        padded = torch.cat([segment, segment[:, -1:].expand(-1, extra)], dim=1)
        y_BTHV, map_BHKV = recomputed(_block, *(pad_tokens(x[:, block], extra) for x in inputs), padded, map_BHKV, size)
        outputs.append(y_BTHV[:, : block.stop - block.start])
        # The state now belongs to the last token's document: number documents from there.
        segment_BT = segment_BT - segment[:, -1:]
    return tokens.zero_padding(torch.cat(outputs, dim=1)).to(v_BTHV.dtype), DeltaState(map_BHKV)


def _block(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, gate: Tensor, segment_BT: Tensor, map_BHKV: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Outputs of a block of whole chunks, and the state after it."""
    q, k, v, a, b, gate = (to_chunks(x, size) for x in (q, k, v, a, b, gate))
    segment_BNC = to_chunks(segment_BT, size)
    maps = chunk_maps(q, k, a, b, gate, segment_BNC, segments_before(segment_BNC))
    added_BNHKV = maps.keys.transpose(-1, -2) @ v
    before = []
    for carry_BHKK, added_BHKV in zip(maps.carry.unbind(1), added_BNHKV.unbind(1), strict=True):
        before.append(map_BHKV)
        map_BHKV = carry_BHKK @ map_BHKV + added_BHKV
    y_BNHCV = maps.queries @ torch.stack(before, dim=1) + maps.weights @ v
    return from_chunks(y_BNHCV), map_BHKV


def _native(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    a_BTHK: Tensor,
    b_BTHK: Tensor | None,
    log_decay: Tensor | None,
    state: DeltaState,
    tokens: Tokens,
) -> tuple[Tensor, DeltaState]:
    inputs = (q_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTHK, log_decay, state.map_BHKV)
    y_BTHV, map_BHKV = native.delta_attention(*inputs, tokens.mask, tokens.reset)
    return y_BTHV, DeltaState(map_BHKV)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor | None, gate: Tensor | None, tokens: Tokens
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Working dtype, a gate with a channel axis, and padding that neither fades, erases nor adds."""
    dtype = compute_dtype(q)
    if gate is None:
        gate = q.new_zeros(()).expand(*q.shape[:3])
    gate = (gate if gate.dim() == 4 else gate[..., None]).clamp_min(FORGET)
    b = -k if b is None else b
    k, v, a, b, gate = (tokens.fill_padding(x.to(dtype), 0.0) for x in (k, v, a, b, gate))
    return q.to(dtype), k, v, a, b, gate


def _example(draw: Draw) -> Example:
    B, T, H, K, V = draw.B, draw.T, 4, 16, 24
    q, k, v, gate = (draw.normal(B, T, H, width) for width in (K, K, V, K))
    unit, gate = torch.nn.functional.normalize(k, dim=-1), -gate.abs()
    return (q, 0.5 * unit, v, gate.exp() * unit, -0.5 * unit, gate), {}


@operation(
    reference=delta_attention_reference,
    chunked=delta_attention_chunked,
    step=delta_attention_reference,
    native=_native,
    example=_example,
)
def delta_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    a_BTHK: Tensor,
    b_BTHK: Tensor | None = None,
    log_decay: Tensor | None = None,
    *,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """S_t = diag(e^{g_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T, y_t = q_t^T S_t: a token erases, then writes.

    Shapes: q, k, a and b (B, T, H, K), v (B, T, H, V); without b it is -k; ``log_decay`` g is None, (B, T, H) or
    (B, T, H, K), at most 0. Returns y (B, T, H, V), 0 at padding, and the :class:`DeltaState` after these tokens.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, or a state of something else.
    """
    axes = Axes("delta_attention")
    axes.bind("q", q_BTHK, "BTHK")
    axes.bind("k", k_BTHK, "BTHK")
    axes.bind("v", v_BTHV, "BTHV")
    sizes = axes.bind("a", a_BTHK, "BTHK")
    if b_BTHK is not None:
        axes.bind("b", b_BTHK, "BTHK")
    if log_decay is not None:
        letters = {3: "BTH", 4: "BTHK"}.get(log_decay.dim())
        if letters is None:
            raise ValueError(
                f"delta_attention: log_decay has shape {given(log_decay)}, expected (B, T, H) or (B, T, H, K)"
            )
        axes.bind("log_decay", log_decay, letters)
    tokens = require_tokens("delta_attention", tokens, q_BTHK, state)
    before = require_state("delta_attention", state, DeltaState.empty(q_BTHK, sizes["H"], sizes["K"], sizes["V"]))
    return q_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTHK, log_decay, before, tokens
