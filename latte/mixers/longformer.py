"""Longformer (Beltagy et al., 2020): a window on both sides, and a few tokens that see all and are seen by all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, repeat_heads, split_heads
from latte.layers.rotary import rotary
from latte.mixers.base import Preset
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import EMPTY, window_attention
from latte.ops.numbers import compute_dtype, log_add
from latte.shapes import require_divides
from latte.state import State
from latte.tokens import Tokens


@register("longformer")
class LongformerMixer(HeadMixer):
    """y_t = sum_s softmax_s(q_t . k_s / sqrt(K)) v_s over |s - t| <= w and the global tokens, under one softmax.

    The first ``global_tokens`` of a document are global: their own y_t is softmax attention to the whole document with
    projections q', k', v' of its own; the others see them through the ordinary k and v, once where they are also in the
    window. Linear in the length. Source: arXiv 2004.05150. Any token may be global there; here the first ones, where
    classifiers have theirs. Rotary encoding gives the places, there a learned table in the model; its dilation
    and its biases are left out. ``window`` counts one side, as in the authors' code (512 in transformers is 256 here).
    """

    @dataclass(frozen=True)
    class Options:
        window: int = 256  # tokens on each side
        global_tokens: int = 1
        rope: bool = True

    directions = ("bidirectional",)
    examples = (
        {"window": 3, "bidirectional": True},
        {"window": 2, "global_tokens": 4, "num_key_value_heads": 1, "bidirectional": True},
        {"window": 4, "global_tokens": 0, "rope": False, "bidirectional": True},
        {"window": 0, "global_tokens": 2, "rope": False, "bidirectional": True},
    )
    presets: ClassVar[Mapping[str, Preset] | None] = {
        "longformer": lambda size: {"mixer_options": {"window": size.window}},
    }

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        options = self.options
        for name in ("window", "global_tokens"):
            if getattr(options, name) < 0:
                raise ValueError(f"mixer 'longformer': {name} is {getattr(options, name)}, expected at least 0")
        if options.rope:
            require_divides("mixer 'longformer'", 2, config.width, "channels in a pair", "head width")
        queries, keys = config.num_heads * config.width, config.kv_heads * config.width
        self.q_proj, self.k_proj = Linear(config.hidden_size, queries), Linear(config.hidden_size, keys)
        if options.global_tokens:
            self.global_q_proj = Linear(config.hidden_size, queries)
            self.global_k_proj, self.global_v_proj = (Linear(config.hidden_size, keys) for _ in range(2))
        self.rotary = rotary(config.width, config.rope_theta) if options.rope else None

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        heads, groups = self.config.num_heads, self.config.kv_heads
        q, k = self._turned(split_heads(self.q_proj(x_BTD), heads), split_heads(self.k_proj(x_BTD), groups), tokens)
        w = self.options.window
        y_BTHV, log_norm_BTH, _ = window_attention(q, k, v_BTGV, left=w, right=w, tokens=tokens)
        if not self.options.global_tokens:
            return y_BTHV, None
        k, v = repeat_heads(k, heads), repeat_heads(v_BTGV, heads)
        wide_q = split_heads(self.global_q_proj(x_BTD), heads)
        wide_q, wide_k = self._turned(wide_q, split_heads(self.global_k_proj(x_BTD), groups), tokens)
        wide_v = split_heads(self.global_v_proj(x_BTD), groups)
        wide = (wide_q, repeat_heads(wide_k, heads), repeat_heads(wide_v, heads))
        return tokens.over_documents(self._with_globals, y_BTHV, log_norm_BTH, q, k, v, *wide), None

    def _turned(self, q_BTHK: Tensor, k_BTGK: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        if self.rotary is None:
            return q_BTHK, k_BTGK
        return self.rotary.turn(q_BTHK, tokens), self.rotary.turn(k_BTGK, tokens)

    def _with_globals(
        self,
        y_RLHV: Tensor,
        log_norm_RLH: Tensor,
        q_RLHK: Tensor,
        k_RLHK: Tensor,
        v_RLHV: Tensor,
        global_q_RLHK: Tensor,
        global_k_RLHK: Tensor,
        global_v_RLHV: Tensor,
        real_RL: Tensor,
    ) -> Tensor:
        """Documents as rows: the window's means with the global tokens behind it, then the global tokens' own."""
        N, dtype, scale = self.options.global_tokens, compute_dtype(q_RLHK), self.config.width**-0.5
        place_L = torch.arange(q_RLHK.shape[1], device=q_RLHK.device)
        behind_LN = place_L[:N] < place_L[:, None] - self.options.window
        logits_RLHN = torch.einsum("rlhk,rnhk->rlhn", q_RLHK, k_RLHK[:, :N]).to(dtype) * scale
        logits_RLHN = torch.where(behind_LN[:, None], logits_RLHN, EMPTY)
        log_norm_RLH = log_norm_RLH.to(dtype)
        total_RLH = log_add(log_norm_RLH, logits_RLHN.logsumexp(dim=-1))
        weights_RLHN = (logits_RLHN - total_RLH[..., None]).exp()
        far_RLHV = torch.einsum("rlhn,rnhv->rlhv", weights_RLHN, v_RLHV[:, :N].to(dtype))
        local_RLHV = (log_norm_RLH - total_RLH).exp()[..., None] * y_RLHV + far_RLHV
        logits_RHNL = torch.einsum("rnhk,rlhk->rhnl", global_q_RLHK[:, :N], global_k_RLHK).to(dtype) * scale
        weights_RHNL = torch.where(real_RL[:, None, None], logits_RHNL, EMPTY).softmax(dim=-1)
        global_RNHV = torch.einsum("rhnl,rlhv->rnhv", weights_RHNL, global_v_RLHV.to(dtype))
        return torch.cat([global_RNHV.to(v_RLHV.dtype), local_RLHV[:, N:].to(v_RLHV.dtype)], dim=1)

    def flops_per_token(self, context: int) -> int:
        seen = min(context, 2 * self.options.window + 1 + 2 * self.options.global_tokens)
        return super().flops_per_token(context) + 4 * seen * self.config.num_heads * self.config.width
