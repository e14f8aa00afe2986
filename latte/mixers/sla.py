"""SLA (Zhang et al., 2025): softmax attention to the blocks that matter most, and linear attention beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.block_sparse import (
    Kept,
    attend_by_features,
    attend_to_kept,
    block_means,
    blocks_to_keep,
    features,
    heads_in_blocks,
    in_blocks,
    keep_blocks,
)
from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, repeat_heads, split_heads
from latte.layers.marks import Mark
from latte.layers.rotary import rotary
from latte.mixers.base import Preset
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops.numbers import compute_dtype
from latte.shapes import require_divides
from latte.state import State
from latte.tokens import Tokens


class BlockSparseMixer(HeadMixer):
    """Documents cut into blocks of ``block`` tokens, of which each block of queries keeps a fraction ``keep``.

    Subclasses have the options ``block``, ``keep`` and ``rope``, and define :meth:`attend`.
    """

    directions = ("bidirectional",)

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        options = self.options
        if options.block < 1:
            raise ValueError(f"mixer {self.name!r}: block is {options.block}, expected at least 1")
        if not 0 < options.keep <= 1:
            raise ValueError(f"mixer {self.name!r}: keep is {options.keep}, expected a fraction above 0, at most 1")
        if options.rope:
            require_divides(f"mixer {self.name!r}", 2, config.width, "channels in a pair", "head width")
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.width)
        self.k_proj = Linear(config.hidden_size, config.kv_heads * config.width)
        self.rotary = rotary(config.width, config.rope_theta) if options.rope else None
        self.build_branches()
        self.reset_parameters()

    def build_branches(self) -> None:
        """Parameters beside the projections."""

    def gate_logits(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Numbers of each token and head (B, T, H, 1) that :meth:`attend` needs, if any."""
        return ()

    def attend(self, q_RHICK: Tensor, k_RHJCK: Tensor, v_RHJCV: Tensor, *gates: Tensor, real_RJC: Tensor) -> Tensor:
        """Heads (R, H, I, C, V) of documents in blocks."""
        raise NotImplementedError("an abstract method: every block-sparse attention defines it")

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        heads, groups = self.config.num_heads, self.config.kv_heads
        q, k = split_heads(self.q_proj(x_BTD), heads), split_heads(self.k_proj(x_BTD), groups)
        if self.rotary is not None:
            q, k = self.rotary.turn(q, tokens), self.rotary.turn(k, tokens)
        parts = (q, repeat_heads(k, heads), repeat_heads(v_BTGV, heads), *self.gate_logits(x_BTD))
        return tokens.over_documents(self._attend_rows, *parts).to(v_BTGV.dtype), None

    def _attend_rows(self, *given: Tensor) -> Tensor:
        *parts_RLH, real_RL = given
        block, dtype = self.options.block, compute_dtype(given[0])
        parts_RHJC = (heads_in_blocks(part.to(dtype), block) for part in parts_RLH)
        y_RHICV = self.attend(*parts_RHJC, real_RJC=in_blocks(real_RL, block))
        return y_RHICV.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, : real_RL.shape[1]]

    def flops_per_token(self, context: int) -> int:
        """Attention to the kept blocks, and a sum and a read of k v^T."""
        block, width = self.options.block, self.config.width
        seen = min(context, block * blocks_to_keep(self.options.keep, -(-context // block)))
        projections = 2 * sum(module.weight.numel() for module in self.modules() if isinstance(module, Linear))
        return projections + 4 * self.config.num_heads * width * (seen + width)


@register("sla")
class SLAMixer(BlockSparseMixer):
    """y_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s + W sum_s f_ts v_s, f_ts = phi(q_t) . phi(k_s) / (its sum over s).

    The first sum runs over kept blocks: a block of queries keeps the key blocks whose mean key has the largest product
    with its mean query, a fraction ``keep`` of the document's, rounded up. The second runs over ``all`` tokens (the
    authors' code) or the ``rest``, those of the blocks not kept (the paper): option ``linear``. W starts at 0: at first
    y is sparse attention.

    Source: arXiv 2509.24006, to tune models of videos further. Its code rounds the number of blocks down, to none where
    there are few, and takes the mean of all keys from each, which changes no order; its bias beside W is left out, and
    so are the blocks that the paper skips in both sums. Rotary encoding gives the places. The choice of blocks costs
    L^2 / block^2, and attention keep L^2.
    """

    @dataclass(frozen=True)
    class Options:
        block: int = 64
        keep: float = 0.1
        features: Literal["softmax", "elu", "relu"] = "softmax"  # phi
        linear: Literal["all", "rest"] = "all"
        rope: bool = True

    examples = (
        {"block": 4, "keep": 0.4, "bidirectional": True},
        {"block": 3, "keep": 0.3, "linear": "rest", "features": "elu", "num_key_value_heads": 1, "bidirectional": True},
        {"block": 5, "keep": 1.0, "linear": "rest", "features": "relu", "rope": False, "bidirectional": True},
    )
    presets: ClassVar[Mapping[str, Preset] | None] = {"sla": lambda size: {"mixer_options": {"block": size.window}}}
    marks: ClassVar[Mapping[str, Mark]] = {"linear_weight": Mark(float32=True)}

    def build_branches(self) -> None:
        self.linear_weight = nn.Parameter(torch.empty(self.config.width, self.config.width))  # W, for all heads

    def reset_parameters(self) -> None:
        init.zeros_(self.linear_weight)

    def attend(self, q_RHICK: Tensor, k_RHJCK: Tensor, v_RHJCV: Tensor, *gates: Tensor, real_RJC: Tensor) -> Tensor:
        q_mean, k_mean = block_means(q_RHICK, real_RJC), block_means(k_RHJCK, real_RJC)
        kept: Kept = keep_blocks(q_mean @ k_mean.transpose(-1, -2), real_RJC, self.options.keep)
        sparse_RHICV = attend_to_kept(q_RHICK, k_RHJCK, v_RHJCV, real_RJC, kept)
        q, k = (features(self.options.features, x) for x in (q_RHICK, k_RHJCK))
        rest_RHIJ = kept.rest(real_RJC.any(-1)) if self.options.linear == "rest" else None
        linear_RHICV = attend_by_features(q, k, v_RHJCV, real_RJC, rest_RHIJ)
        return sparse_RHICV + linear_RHICV @ self.linear_weight.to(linear_RHICV.dtype).T

    def flops_per_token(self, context: int) -> int:
        return super().flops_per_token(context) + 2 * self.config.num_heads * self.linear_weight.numel()
