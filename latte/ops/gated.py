"""The chunked core shared by every matrix-state recurrence with a gate on the key side.

    S_t = diag(e^{g_t}) S_{t-1} + k_t v_t^T        y_t = q_t^T S_t

Inside a chunk this is attention with weights sum_i q_ti k_si e^{G_ti - G_si}, G the cumulative gate; between chunks
only the state passes. Latte is the case G = -log-normaliser (see log_key.py), linear attention G = 0, RetNet and
Mamba-2 a scalar gate, GLA a free one per channel.

No factor may overflow, however strong the gate: e^{G_t - G_s} is split around a pivot between s and t, the gate where
an earlier sub-block ended, so that both exponents are at most 0. Within a sub-block it is formed entry by entry.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.modes import values_hidden
from latte.ops.numbers import exp_where

CHUNK = 64
SUB_BLOCK = 16
# Tokens whose chunks are worked on at once: bounds scratch memory, whatever the length.
BLOCK = 2048


class Chunks(NamedTuple):
    """One block of tokens, cut into N chunks of C; the gate's last axis is K wide, or 1 for a scalar gate."""

    q_BNHCK: Tensor
    k_BNHCK: Tensor
    v_BNHCV: Tensor
    gate_BNHCK: Tensor  # cumulative and inclusive; any constant may be added per chunk; may be wider than q, k and v
    gate_in_BNHK: Tensor  # the cumulative gate just before each chunk, on the same scale
    carry_BNHK: Tensor  # log of what a chunk leaves of the state it gets: last gate - gate_in
    segment_BNC: Tensor
    segment_in_BN: Tensor  # the document of the state that each chunk gets


def to_chunks(x_BT: Tensor, size: int) -> Tensor:
    """(B, T, H, W) to (B, N, H, C, W), or (B, T) to (B, N, C); T must be a multiple of ``size``."""
    x = x_BT.unflatten(1, (-1, size))
    return x.transpose(2, 3).contiguous() if x.dim() == 5 else x


def from_chunks(y_BNHCV: Tensor) -> Tensor:
    return y_BNHCV.transpose(2, 3).flatten(1, 2)


class Outputs:
    """The outputs of one block of tokens after the other, as one (B, T, H, V) tensor in the end.

    Without gradients they are written where they belong at once: a long output is not in memory twice.
    """

    def __init__(self, like_BTHV: Tensor, dtype: torch.dtype) -> None:
        once = not torch.is_grad_enabled() and not values_hidden(like_BTHV)
        self.whole = torch.empty(like_BTHV.shape, dtype=dtype, device=like_BTHV.device) if once else None
        self.parts: list[Tensor] = []
        self.length = 0

    def append(self, y_BNHCV: Tensor, tokens: int) -> None:
        if self.whole is None:
            self.parts.append(from_chunks(y_BNHCV)[:, :tokens])
            return
        size = y_BNHCV.shape[3]
        whole, rest = divmod(tokens, size)
        place = self.whole[:, self.length : self.length + tokens]
        place[:, : whole * size].unflatten(1, (-1, size)).copy_(y_BNHCV[:, :whole].transpose(2, 3))
        if rest:
            place[:, whole * size :].copy_(y_BNHCV[:, whole, :, :rest].transpose(1, 2))
        self.length += tokens

    def joined(self) -> Tensor:
        return torch.cat(self.parts, dim=1) if self.whole is None else self.whole


def chunk_size(tokens: int) -> int:
    """The chunk for ``tokens`` tokens: the usual one, or just enough sub-blocks for a short row."""
    return min(CHUNK, -(-tokens // SUB_BLOCK) * SUB_BLOCK)


def pad_tokens(x_BT: Tensor, extra: int, value: float = 0.0) -> Tensor:
    """``extra`` tokens of ``value`` behind each row."""
    if extra == 0:
        return x_BT
    return F.pad(x_BT, (0, 0) * (x_BT.dim() - 2) + (0, extra), value=value)


def segments_before(segment_BNC: Tensor) -> Tensor:
    """The document that the state entering each chunk belongs to; 0 enters the first."""
    return F.pad(segment_BNC[:, :-1, -1], (1, 0))


def gated_chunks(x: Chunks, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    """Run the recurrence over one block of chunks: (outputs (B,N,H,C,V), final state (B,H,K,V))."""
    # What each chunk adds to the state, as seen from its end.
    last_BNHK = x.gate_BNHCK[..., -1, :]
    last_segment_BN = x.segment_BNC[..., -1]
    kept_BN1C1 = (x.segment_BNC == last_segment_BN[..., None])[:, :, None, :, None]
    fade_BNHCK = exp_where(x.q_BNHCK, kept_BN1C1, last_BNHK[..., None, :] - x.gate_BNHCK)
    added_BNHKV = (x.k_BNHCK * fade_BNHCK).transpose(-1, -2) @ x.v_BNHCV
    carry_BNHK = exp_where(x.q_BNHCK, (last_segment_BN == x.segment_in_BN)[:, :, None, None], x.carry_BNHK)
    before_BNHKV, after_BHKV = pass_states(carry_BNHK, added_BNHKV, state_BHKV)
    return _within(x) + read_states(x, before_BNHKV), after_BHKV


def pass_states(carry_BNHK: Tensor, added_BNHKV: Tensor, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    """From chunk to chunk: the states before each (B,N,H,K,V), and after the last."""
    states = []
    for carry_BHK, added_BHKV in zip(carry_BNHK.unbind(1), added_BNHKV.unbind(1), strict=True):
        states.append(state_BHKV)
        state_BHKV = carry_BHK[..., None] * state_BHKV + added_BHKV
    return torch.stack(states, dim=1), state_BHKV


def read_states(x: Chunks, before_BNHKV: Tensor) -> Tensor:
    """What each token reads of the state its chunk got."""
    reads_BN1C1 = (x.segment_BNC == x.segment_in_BN[..., None])[:, :, None, :, None]
    reach_BNHCK = exp_where(x.q_BNHCK, reads_BN1C1, x.gate_BNHCK - x.gate_in_BNHK[..., None, :])
    return (x.q_BNHCK * reach_BNHCK) @ before_BNHKV


def _within(x: Chunks) -> Tensor:
    """Outputs from keys of the same chunk."""
    return _within_scalar(x) if x.gate_BNHCK.shape[-1] == 1 else within_channels(x)


def _within_scalar(x: Chunks) -> Tensor:
    """One gate for all channels: a plain product of queries and keys, faded by the time between them."""
    gate_BNHC = x.gate_BNHCK[..., 0]
    seen_BN1CC = seen_within(x.segment_BNC)[:, :, None]
    fade_BNHCC = exp_where(x.q_BNHCK, seen_BN1CC, gate_BNHC[..., :, None] - gate_BNHC[..., None, :])
    return (x.q_BNHCK @ x.k_BNHCK.transpose(-1, -2) * fade_BNHCC) @ x.v_BNHCV


def within_channels(x: Chunks) -> Tensor:
    """A gate per channel: sub-blocks against the ones before them around a pivot, and each against itself."""
    C = x.q_BNHCK.shape[-2]
    outputs = []
    for start in range(0, C, SUB_BLOCK):
        here = slice(start, min(start + SUB_BLOCK, C))
        q, k, v, gate = (t[..., here, :] for t in (x.q_BNHCK, x.k_BNHCK, x.v_BNHCV, x.gate_BNHCK))
        segment = x.segment_BNC[..., here]
        fade = exp_where(
            x.q_BNHCK, seen_within(segment)[:, :, None, :, :, None], gate[..., :, None, :] - gate[..., None, :, :]
        )
        y = (q[..., :, None, :] * k[..., None, :, :] * fade).sum(-1) @ v
        if start:
            past = slice(0, start)
            pivot = x.gate_BNHCK[..., start - 1, None, :]
            pivot_segment = x.segment_BNC[..., start - 1, None]
            reach = exp_where(x.q_BNHCK, (segment == pivot_segment)[:, :, None, :, None], gate - pivot)
            same = (x.segment_BNC[..., past] == pivot_segment)[:, :, None, :, None]
            fade_past = exp_where(x.q_BNHCK, same, pivot - x.gate_BNHCK[..., past, :])
            weights = (q * reach) @ (x.k_BNHCK[..., past, :] * fade_past).transpose(-1, -2)
            y = y + weights @ x.v_BNHCV[..., past, :]
        outputs.append(y)
    return torch.cat(outputs, dim=-2)


def seen_within(segment_NC: Tensor) -> Tensor:
    """Which tokens of a run see which: not the future, not another document."""
    C = segment_NC.shape[-1]
    causal = torch.ones(C, C, dtype=torch.bool, device=segment_NC.device).tril()
    return causal & (segment_NC[..., :, None] == segment_NC[..., None, :])
