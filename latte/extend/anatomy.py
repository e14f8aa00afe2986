"""Where the decode engine finds the parts of an extended model's layers, in families that are like Llama's."""

from __future__ import annotations

import torch
from torch import nn
from transformers.activations import ACT2FN

from latte.extend.layer import ExtendedAttention, ExtendedMixer, PretrainedWindow
from latte.layers.linear import Linear, TokenLinear
from latte.models.engine import Anatomy, Mixing, Mlp, Norm, Sublayer, Unfit, Walk


class ExtendedAnatomy(Anatomy):
    """Of the layers of a pretrained model whose attention was extended."""

    products = (Linear, TokenLinear)

    def body_is_plain(self, body: nn.Module) -> bool:
        return True  # an extended model calls the layers of the pretrained body, never the body

    def allows(self, dtype: torch.dtype) -> bool:
        return dtype == torch.float32  # in float64 the pretrained norms would still compute in float32

    def sublayers(self, block: nn.Module, walk: Walk) -> list[Sublayer]:
        attention = walk.child(block, "self_attn", ExtendedAttention)
        mixer = walk.child(attention, "mixer", ExtendedMixer)
        window = walk.child(mixer, "window", PretrainedWindow)
        if not window.family.like_llama:
            raise Unfit(f"family {type(window.family).__name__} has no stages")
        pretrained, mlp = walk.child(window, "attention"), walk.child(block, "mlp")
        norms = [walk.child(block, name) for name in ("input_layernorm", "post_attention_layernorm")]
        for module in (block, pretrained, mlp, *norms):
            if not _from_transformers(module):
                raise Unfit(f"a {type(module).__name__} stands in the place of a pretrained module")
        walk.child(mlp, "act_fn", type(ACT2FN["silu"]))
        return [Sublayer(norms[0], Mixing(mixer, pretrained, pretrained)), Sublayer(norms[1], Mlp(mlp, "silu"))]

    def norm(self, norm: nn.Module) -> Norm:
        eps = getattr(norm, "variance_epsilon", None)
        return Norm(eps) if isinstance(eps, float) and _from_transformers(norm) else super().norm(norm)


def _from_transformers(module: nn.Module) -> bool:
    """Whether a module is what its family says, and not something that was put in its place."""
    return type(module).__module__.startswith("transformers.models.")
