"""Attention to some blocks of a document by softmax, and to all or the others by features: what SLA and SLA2 share.

R documents as rows, H heads, I blocks of queries, J blocks of keys of C tokens each, M blocks kept for each block of
queries.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.numbers import EMPTY

#: Added to features, so that a query always has weights to divide by.
FLOOR = 1e-6


class Kept(NamedTuple):
    """For each block of queries, the numbers of the key blocks that it attends to by softmax, and which of them count.

    A document of fewer blocks keeps fewer; what is left of the M places does not count.
    """

    index_RHIM: Tensor
    counts_RHIM: Tensor

    def rest(self, there_RJ: Tensor) -> Tensor:
        """(R, H, I, J): key blocks of the document that are not kept."""
        kept_RHIJ = torch.zeros_like(self.counts_RHIM[..., :1]).expand(*self.index_RHIM.shape[:3], there_RJ.shape[1])
        return there_RJ[:, None, None] & ~kept_RHIJ.scatter(-1, self.index_RHIM, self.counts_RHIM)


def in_blocks(x_RL: Tensor, size: int) -> Tensor:
    """(R, L, ...) to (R, J, C, ...), with zeros behind the last token."""
    extra = -x_RL.shape[1] % size
    return F.pad(x_RL, (*([0, 0] * (x_RL.dim() - 2)), 0, extra)).unflatten(1, (-1, size))


def heads_in_blocks(x_RLHK: Tensor, size: int) -> Tensor:
    """(R, L, H, K) to (R, H, J, C, K), with zeros behind the last token."""
    return in_blocks(x_RLHK, size).permute(0, 3, 1, 2, 4)


def block_means(x_RHJCK: Tensor, real_RJC: Tensor) -> Tensor:
    """(R, H, J, K): the mean of the real tokens of each block; x is 0 at the others."""
    count_RJ = real_RJC.sum(-1).clamp(min=1).to(x_RHJCK.dtype)
    return x_RHJCK.sum(-2) / count_RJ[:, None, :, None]


def blocks_to_keep(fraction: float, blocks: int) -> int:
    """How many of so many blocks are kept: the fraction, rounded up."""
    return math.ceil(fraction * blocks - 1e-9)


def keep_blocks(score_RHIJ: Tensor, real_RJC: Tensor, fraction: float) -> Kept:
    """The key blocks with the highest scores for each block of queries. The choice has no gradient."""
    there_RJ = real_RJC.any(-1)
    score_RHIJ = torch.where(there_RJ[:, None, None], score_RHIJ.detach(), EMPTY)
    index_RHIM = score_RHIJ.topk(blocks_to_keep(fraction, there_RJ.shape[1])).indices
    wanted_R = (fraction * there_RJ.sum(-1).double() - 1e-9).ceil()
    rank_M = torch.arange(index_RHIM.shape[-1], device=score_RHIJ.device)
    return Kept(index_RHIM, (rank_M < wanted_R[:, None])[:, None, None].expand_as(index_RHIM))


def attend_to_kept(
    q_RHICK: Tensor, k_RHJCK: Tensor, v_RHJCV: Tensor, real_RJC: Tensor, kept: Kept, bias_RHIJ: Tensor | None = None
) -> Tensor:
    """Softmax attention (R, H, I, C, V) to the tokens of kept blocks; ``bias`` is added to the logits of a block."""
    R, H, I, M = kept.index_RHIM.shape
    C = real_RJC.shape[-1]

    def taken(x_RHJ: Tensor) -> Tensor:
        """(R, H, J, ...) to (R, H, I, M, ...)."""
        index = kept.index_RHIM.reshape(R, H, I * M, *([1] * (x_RHJ.dim() - 3)))
        return x_RHJ.gather(2, index.expand(-1, -1, -1, *x_RHJ.shape[3:])).unflatten(2, (I, M))

    k_RHISK, v_RHISV = taken(k_RHJCK).flatten(3, 4), taken(v_RHJCV).flatten(3, 4)
    seen_RHIMC = taken(real_RJC[:, None].expand(-1, H, -1, -1)) & kept.counts_RHIM[..., None]
    logits_RHICS = q_RHICK @ k_RHISK.transpose(-1, -2) * q_RHICK.shape[-1] ** -0.5
    if bias_RHIJ is not None:
        bias_RHIM = bias_RHIJ.gather(-1, kept.index_RHIM)
        logits_RHICS = logits_RHICS + bias_RHIM.repeat_interleave(C, dim=-1)[..., None, :]
    logits_RHICS = torch.where(seen_RHIMC.flatten(3)[..., None, :], logits_RHICS, EMPTY)
    return logits_RHICS.softmax(dim=-1) @ v_RHISV


def attend_by_features(
    q_RHICF: Tensor, k_RHJCF: Tensor, v_RHJCV: Tensor, real_RJC: Tensor, rest_RHIJ: Tensor | None = None
) -> Tensor:
    """Normalised linear attention (R, H, I, C, V) to all tokens, or to those of the blocks in ``rest``; 0 if none are.

    Sums over the rest add up its blocks. Taking the kept ones from the sum over all would lose digits.
    """
    k_RHJCF = torch.where(real_RJC[:, None, ..., None], k_RHJCF, 0.0)
    sums_RHJFV = k_RHJCF.transpose(-1, -2) @ F.pad(v_RHJCV, (0, 1), value=1.0)
    if rest_RHIJ is None:
        read_RHIFV = sums_RHJFV.sum(2, keepdim=True)
    else:
        read_RHIFV = torch.einsum("rhij,rhjfv->rhifv", rest_RHIJ.to(sums_RHJFV.dtype), sums_RHJFV)
    y_RHICV = q_RHICF @ read_RHIFV
    norm_RHIC1 = y_RHICV[..., -1:]
    return y_RHICV[..., :-1] / torch.where(norm_RHIC1 > 0, norm_RHIC1, 1.0)


def features(kind: str, x: Tensor) -> Tensor:
    """Positive features of queries and keys: ``"softmax"`` over channels, ``"elu"`` + 1, or ``"relu"``."""
    if kind == "softmax":
        return x.softmax(dim=-1) + FLOOR
    return (F.elu(x) + 1 if kind == "elu" else F.relu(x)) + FLOOR
