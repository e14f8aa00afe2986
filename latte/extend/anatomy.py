"""Where the decode engine finds the parts of an extended model's layers, in families that are like Llama's."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from latte.extend.layer import ExtendedAttention, ExtendedMixer, PretrainedWindow
from latte.layers.linear import Linear, TokenLinear
from latte.mixers.latte import LatteMixer
from latte.models.engine import Anatomy, Parts, Unfit, Walk


class ExtendedAnatomy(Anatomy):
    """Of the layers of a pretrained model whose attention was extended."""

    products = (Linear, TokenLinear)

    def mixer_of(self, block: Any) -> LatteMixer:
        return block.self_attn.mixer

    def body_is_plain(self, body: nn.Module) -> bool:
        return True  # an extended model calls the layers of the pretrained body, never the body

    def allows(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32  # in float64 the pretrained norms would still compute in float32

    def parts(self, block: nn.Module, walk: Walk) -> Parts:
        attention = walk.child(block, "self_attn", ExtendedAttention)
        mixer = walk.child(attention, "mixer", ExtendedMixer)
        window = walk.child(mixer, "window", PretrainedWindow)
        if not window.family.like_llama:
            raise Unfit
        pretrained, mlp = walk.child(window, "attention"), walk.child(block, "mlp")
        norms = [walk.child(block, name) for name in ("input_layernorm", "post_attention_layernorm")]
        if not all(map(_from_transformers, (block, pretrained, mlp, *norms))):
            raise Unfit
        walk.child(mlp, "act_fn", type(ACT2FN["silu"]))
        return Parts(mixer, pretrained, pretrained, norms, mlp)

    def eps(self, norm: nn.Module) -> float:
        eps = getattr(norm, "variance_epsilon", None)
        return eps if isinstance(eps, float) and _from_transformers(norm) else super().eps(norm)


def _from_transformers(module: nn.Module) -> bool:
    """Whether a module is what its family says, and not something that was put in its place."""
    return type(module).__module__.startswith("transformers.models.")
