"""The delta rule over a chunk of tokens as four matrices (the WY form of a product of low-rank updates).

    S_t = diag(e^{g_t}) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T        y_t = q_t^T S_t

Let x_t = a_t^T S_{t-1}, and [l, r]_ts = sum_i l_ti r_si e^{G_ti - G_si} with G the cumulative log-decay (up to t - 1
on the side of a). Then X = [a, b] X + [a, k] V + (a . e^G) S_in, a unit lower triangular system, and outputs and the
state after the chunk follow from X, V and S_in. Exponents are split around pivots as in gated.py: none is above 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.gated import SUB_BLOCK, seen_within
from latte.ops.numbers import exp_where, wide_dtype


class ChunkMaps(NamedTuple):
    """A chunk as a linear map: Y = queries S_in + weights V, S_out = carry S_in + keys^T V."""

    queries: Tensor  # (..., C, K)
    weights: Tensor  # (..., C, C), 0 above the diagonal
    keys: Tensor  # (..., C, K)
    carry: Tensor  # (..., K, K)


def chunk_maps(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, gate: Tensor, segment_NC: Tensor, segment_in_N: Tensor
) -> ChunkMaps:
    """The maps of chunks (N, H, C, K), N any number of axes; ``gate`` holds log-decays, K or 1 wide.

    ``segment_in`` numbers the document of the state that each chunk gets.
    """
    seen_NCC = seen_within(segment_NC)
    # Summed in float64 and within each document alone, as in decay_attention.
    wide = gate.to(wide_dtype(gate.device))
    total = seen_NCC.unsqueeze(-3).to(wide.dtype) @ wide
    (Aak, Aab), (Aqk, Aqb) = _pairs(
        torch.stack([a, q]), torch.stack([total - wide, total]), torch.stack([k, b]), total, segment_NC, seen_NCC
    )
    last_N1 = segment_NC[..., -1:]
    reads = (segment_NC == segment_in_N[..., None])[..., None, :, None]
    kept = (segment_NC == last_N1)[..., None, :, None]
    reach_a, reach_q = exp_where(a, reads, total - wide), exp_where(q, reads, total)
    fade = exp_where(k, kept, total[..., -1:, :] - total)
    carried = exp_where(k, (last_N1 == segment_in_N[..., None])[..., None], total[..., -1, :])
    # X = from_state S_in + from_values V
    solved = torch.linalg.solve_triangular(-Aab, torch.cat([a * reach_a, Aak], dim=-1), upper=False, unitriangular=True)
    from_state, from_values = solved.split([a.shape[-1], Aak.shape[-1]], dim=-1)
    erased = (b * fade).transpose(-1, -2)
    return ChunkMaps(
        q * reach_q + Aqb @ from_state,
        Aqk + Aqb @ from_values,
        k * fade + (erased @ from_values).transpose(-1, -2),
        torch.diag_embed(carried.expand_as(a[..., 0, :])) + erased @ from_state,
    )


def _pairs(
    left: Tensor, left_gate: Tensor, right: Tensor, gate: Tensor, segment_NC: Tensor, seen_NCC: Tensor
) -> Tensor:
    """[l, r] of both of ``left`` (a and q) with both of ``right`` (k and b): (2, 2, N, H, C, C).

    a looks at tokens before its own only, q at its own too; neither into another document.
    """
    seen = torch.stack([seen_NCC.tril(-1), seen_NCC])[:, None].unsqueeze(-3)
    left, left_gate = left[:, None], left_gate[:, None]
    if gate.shape[-1] == 1:
        between = left_gate - gate.transpose(-1, -2)
        return left @ right.transpose(-1, -2) * exp_where(left, seen, between)
    C = gate.shape[-2]
    rows = []
    for start in range(0, C, SUB_BLOCK):
        here, past = slice(start, min(start + SUB_BLOCK, C)), slice(0, start)
        l_here, l_gate = left[..., here, :], left_gate[..., here, :]
        between = l_gate[..., :, None, :] - gate[..., None, here, :]
        fade = exp_where(left, seen[..., here, here, None], between)
        row = (l_here[..., :, None, :] * right[..., None, here, :] * fade).sum(-1)
        if start:
            pivot, document = gate[..., start - 1, None, :], segment_NC[..., start - 1, None]
            same = (segment_NC == document)[..., None, :, None]
            reach = exp_where(left, same[..., here, :], l_gate - pivot)
            fade_past = exp_where(right, same[..., past, :], pivot - gate[..., past, :])
            row = torch.cat([(l_here * reach) @ (right[..., past, :] * fade_past).transpose(-1, -2), row], dim=-1)
        rows.append(F.pad(row, (0, C - here.stop)))
    return torch.cat(rows, dim=-2)
