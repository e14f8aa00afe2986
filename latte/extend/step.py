"""One token through all layers of an extended model in one native call, where the family says that its layers fit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from latte.extend.layer import ExtendedAttention, ExtendedMixer, PretrainedWindow
from latte.mixers.latte import LatteMixer
from latte.mixers.layers import Linear, PretrainedLinear
from latte.models.plan import PlanMaker, Unfit


class ExtendedPlanMaker(PlanMaker):
    """Walks over the layers of a pretrained model that are like Llama's."""

    PRODUCTS = (Linear, PretrainedLinear)

    @staticmethod
    def mixer_of(block: Any) -> LatteMixer:
        return block.self_attn.mixer

    def reads_itself(self, body: nn.Module) -> bool:
        return True  # an extended model calls the layers of the pretrained body, never the body

    def layer(self, block: nn.Module) -> tuple[int, ...]:
        attention = self.child(block, "self_attn", ExtendedAttention)
        mixer = self.child(attention, "mixer", ExtendedMixer)
        window = self.child(mixer, "window", PretrainedWindow)
        if not window.family.like_llama:
            raise Unfit
        if self.dtype != torch.float32:  # in float64 the pretrained norms would still compute in float32
            raise Unfit
        home, mlp = self.child(window, "attention"), self.child(block, "mlp")
        norms = [self.child(block, name) for name in ("input_layernorm", "post_attention_layernorm")]
        if not all(map(_from_transformers, (block, home, mlp, *norms))):
            raise Unfit
        self.child(mlp, "act_fn", type(ACT2FN["silu"]))
        return self.fields(mixer, home, home, norms, mlp)

    def eps(self, norm: nn.Module) -> float:
        eps = getattr(norm, "variance_epsilon", None)
        return eps if isinstance(eps, float) and _from_transformers(norm) else super().eps(norm)


def _from_transformers(module: nn.Module) -> bool:
    """Whether a module is what its family says, and not something that was put in its place."""
    return type(module).__module__.startswith("transformers.models.")
