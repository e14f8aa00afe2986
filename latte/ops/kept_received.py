"""Attention that tokens receive while the window sees them: sums over the queries and the heads that share a key.

Weights are those under the softmax of window and sinks. Kept tokens would change them, and so what is kept: then no two
tokens could be computed at the same time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.gated import pad_tokens
from latte.ops.numbers import bounded_exp, compute_dtype
from latte.ops.recompute import recomputed
from latte.ops.window import BLOCK, QUERY_BLOCK, Reach, one_query_logits, scaled_and_capped

#: Scores are bounded: an empty slot (EMPTY) is worse than every token, and a score of NaN is the worst of all.
MOST = 1e29
#: Attention below it counts as this much.
LEAST = 1e-20


def bounded(scores: Tensor) -> Tensor:
    return torch.nan_to_num(scores, nan=-MOST).clamp(-MOST, MOST)


def scores_with_received(scores: Tensor, received: Tensor, weight_G: Tensor) -> Tensor:
    """s + w log(attention received)."""
    return bounded(scores + weight_G.to(scores.dtype) * received.clamp(min=LEAST).log())


def received_in_window(
    q_BTHK: Tensor, k_BSGK: Tensor, log_norm_BTH: Tensor, segment_BT: Tensor, segment_BS: Tensor, reach: Reach
) -> Tensor:
    """(B, S, G): what each key gets from these queries; query t stands at key left + t. Linear in T."""
    total_BSG = torch.zeros(*k_BSGK.shape[:3], dtype=compute_dtype(q_BTHK), device=q_BTHK.device)
    for start in range(0, q_BTHK.shape[1], BLOCK):
        rows, band = slice(start, start + BLOCK), slice(start, start + BLOCK + reach.left)
        args = (q_BTHK[:, rows], k_BSGK[:, band], log_norm_BTH[:, rows], segment_BT[:, rows], segment_BS[:, band])
        got_BSG = recomputed(_received_by_band, *args, reach)
        behind = total_BSG.shape[1] - start - got_BSG.shape[1]
        total_BSG = total_BSG + F.pad(got_BSG, (0, 0, start, behind))
    return total_BSG


def _received_by_band(
    q_BTHK: Tensor, k_BSGK: Tensor, log_norm_BTH: Tensor, segment_BT: Tensor, segment_BS: Tensor, reach: Reach
) -> Tensor:
    dtype, left = compute_dtype(q_BTHK), reach.left
    (B, T), (S, G) = q_BTHK.shape[:2], k_BSGK.shape[1:3]
    size = min(QUERY_BLOCK, T)
    extra, span = -T % size, left + size
    q = pad_tokens(q_BTHK.to(dtype), extra).unflatten(1, (-1, size)).unflatten(3, (G, -1))
    q = q.permute(0, 1, 3, 4, 2, 5).flatten(3, 4)  # (B, n, G, queries of the group's heads, K)
    norm = pad_tokens(log_norm_BTH.to(dtype), extra).unflatten(1, (-1, size)).unflatten(3, (G, -1))
    norm = norm.permute(0, 1, 3, 4, 2)[..., None]  # (B, n, G, H/G, C, 1)
    k = pad_tokens(k_BSGK.to(dtype), extra).unfold(1, span, size)
    segment_q = F.pad(segment_BT, (0, extra), value=-1).unflatten(1, (-1, size))
    segment_k = F.pad(segment_BS, (0, extra), value=-2).unfold(1, span, size)
    place = torch.arange(span, device=q.device) - torch.arange(size, device=q.device)[:, None]
    seen = (place >= 0) & (place <= left) & (segment_q[..., :, None] == segment_k[..., None, :])
    logits = scaled_and_capped(q @ k, reach).unflatten(3, (-1, size))
    weights = torch.where(seen[:, :, None, None], bounded_exp(logits - norm), 0.0)
    got = weights.sum(dim=(3, 4)).transpose(2, 3)  # (B, n, span, G)
    index = torch.arange(got.shape[1], device=q.device)[:, None] * size + torch.arange(span, device=q.device)
    empty = torch.zeros(B, S + extra, G, dtype=dtype, device=q.device)
    return empty.index_add(1, index.flatten(), got.flatten(1, 2))[:, :S]


def received_from_one(q_B1HK: Tensor, k_BSGK: Tensor, log_norm_B1H: Tensor, seen_BS: Tensor, reach: Reach) -> Tensor:
    """The same of one query: (B, S, G)."""
    logits_BHS = one_query_logits(q_B1HK, k_BSGK, reach)
    weights_BHS = torch.where(seen_BS[:, None], bounded_exp(logits_BHS - log_norm_B1H.transpose(1, 2)), 0.0)
    return weights_BHS.unflatten(1, (k_BSGK.shape[2], -1)).sum(dim=2).transpose(1, 2)
