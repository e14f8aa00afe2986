"""Gemma 2: capped logits in attention and at the end, queries with a scale of their own, alternating windows."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from latte.extend.families.base import Family, Shape, register


@register
class Gemma2(Family):
    model_types = ("gemma2",)
    shape: ClassVar[Shape | None] = Shape(
        before=("input_layernorm", "pre_feedforward_layernorm"),
        after=("post_attention_layernorm", "post_feedforward_layernorm"),
    )

    def refusal(self, config: Any) -> str | None:
        if getattr(config, "use_bidirectional_attention", False):
            return "its attention is bidirectional, expected a causal model"
        return super().refusal(config)

    def scale(self, config: Any) -> float:
        return config.query_pre_attn_scalar**-0.5

    def softcap(self, config: Any) -> float | None:
        return config.attn_logit_softcapping

    def finish_logits(self, logits: Tensor, config: Any) -> Tensor:
        cap = config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)
