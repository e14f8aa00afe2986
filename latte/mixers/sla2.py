"""SLA2 (2026), our reading: a learned router chooses blocks for softmax attention; linear attention reads others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.block_sparse import attend_by_features, attend_to_kept, block_means, features, keep_blocks
from latte.layers.linear import Linear
from latte.layers.marks import Mark
from latte.mixers.base import Preset
from latte.mixers.registry import register
from latte.mixers.sla import BlockSparseMixer

#: Where the logits of a start: most of the weight is on the kept blocks.
START = 2.0


@register("sla2")
class SLA2Mixer(BlockSparseMixer):
    """y_t = a_t sum_s softmax_s(q_t . k_s / sqrt(K) + log sigmoid(p_ij)) v_s + (1 - a_t) sum_s' f_ts' v_s'.

    The first sum runs over the kept blocks of keys, the second over the tokens s' of all others,
    f_ts = phi(q_t) . phi(k_s) over its sum, and a_t = sigmoid(w . x_t + b), a number per head. The router scores key
    block j for query block i by p_ij = (W_q mean q) . (W_k mean k) / sqrt(K), with W from the identity; a block of
    queries keeps the fraction ``keep`` of the document's blocks with the highest scores, rounded up. The weights are
    probabilities: a softmax over all tokens is of this form, with a_t its mass on the kept ones. Where all blocks are
    kept, a_t = 1.

    Source: arXiv 2602.12675, of which no code is public. There the router is first trained alone, by a soft choice
    among all blocks, then frozen, and a_t is said to be learned for every row: our reading makes it a gate of the
    token, and a kept block's score a gate of its tokens, so that the router learns with all else at the cost of the
    kept blocks. Its blocks of queries are twice as long as those of keys; its 8-bit arithmetic is left out.
    """

    @dataclass(frozen=True)
    class Options:
        block: int = 64
        keep: float = 0.1
        features: Literal["softmax", "elu", "relu"] = "softmax"  # phi
        rope: bool = True

    linear_in_values = normalised = True
    examples = (
        {"block": 4, "keep": 0.4, "bidirectional": True},
        {"block": 3, "keep": 0.3, "features": "elu", "num_key_value_heads": 1, "bidirectional": True},
        {"block": 5, "keep": 0.2, "features": "relu", "rope": False, "bidirectional": True},
    )
    presets: ClassVar[Mapping[str, Preset] | None] = {"sla2": lambda size: {"mixer_options": {"block": size.window}}}
    marks: ClassVar[Mapping[str, Mark]] = {"share_bias": Mark(decay=False)}

    def build_branches(self) -> None:
        heads, width = self.config.num_heads, self.config.width
        self.q_router, self.k_router = (nn.Parameter(torch.empty(heads, width, width)) for _ in range(2))
        self.share_proj = Linear(self.config.hidden_size, heads)
        self.share_bias = nn.Parameter(torch.empty(heads))

    def reset_parameters(self) -> None:
        for weight in (self.q_router, self.k_router):
            init.copy_(weight, torch.eye(weight.shape[-1], dtype=weight.dtype, device=weight.device).expand_as(weight))
        init.constant_(self.share_bias, START)

    def gate_logits(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        return ((self.share_proj(x_BTD) + self.share_bias)[..., None],)

    def attend(self, q_RHICK: Tensor, k_RHJCK: Tensor, v_RHJCV: Tensor, *gates: Tensor, real_RJC: Tensor) -> Tensor:
        dtype = q_RHICK.dtype
        q_RHIK, k_RHJK = (
            torch.einsum("rhik,hlk->rhil", block_means(x, real_RJC), weight.to(dtype))
            for x, weight in ((q_RHICK, self.q_router), (k_RHJCK, self.k_router))
        )
        score_RHIJ = q_RHIK @ k_RHJK.transpose(-1, -2) * self.config.width**-0.5
        kept = keep_blocks(score_RHIJ, real_RJC, self.options.keep)
        rest_RHIJ = kept.rest(real_RJC.any(-1))
        sparse_RHICV = attend_to_kept(q_RHICK, k_RHJCK, v_RHJCV, real_RJC, kept, F.logsigmoid(score_RHIJ))
        q, k = (features(self.options.features, x) for x in (q_RHICK, k_RHJCK))
        linear_RHICV = attend_by_features(q, k, v_RHJCV, real_RJC, rest_RHIJ)
        share_RHIC1 = torch.where(rest_RHIJ.any(-1)[..., None, None], torch.sigmoid(*gates), 1.0)
        return share_RHIC1 * sparse_RHICV + (1 - share_RHIC1) * linear_RHICV
