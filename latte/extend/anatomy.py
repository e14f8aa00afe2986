"""Where the decode engine finds the parts of an extended model's layers."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from latte.extend.layer import ExtendedAttention, ExtendedMixer, PretrainedWindow
from latte.layers.linear import Linear, TokenLinear
from latte.models.engine import Anatomy, Mixing, Mlp, Norm, Sublayer, Unfit, Walk

#: Activations of pretrained MLPs, as stages know them.
ACTIVATIONS = {type(ACT2FN["silu"]): "silu", nn.SiLU: "silu", type(ACT2FN["gelu_pytorch_tanh"]): "gelu_tanh"}


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
        shape = window.family.shape
        if shape is None:
            raise Unfit(f"family {type(window.family).__name__} has no stages")
        pretrained, mlp = walk.child(window, "attention"), walk.child(block, "mlp")
        before = [walk.child(block, name) for name in shape.before]
        after = [walk.child(block, name) for name in shape.after or ()]
        heads = None
        if shape.heads is not None:
            heads = (walk.child(pretrained, shape.heads[0]), walk.child(pretrained, shape.heads[1]))
        for module in (block, pretrained, mlp):
            if not _from_transformers(module):
                raise Unfit(f"a {type(module).__name__} stands in the place of a pretrained module")
        activation = ACTIVATIONS[type(walk.child(mlp, "act_fn", *ACTIVATIONS))]
        parts: list[Mixing | Mlp] = [Mixing(mixer, pretrained, pretrained, heads), Mlp(mlp, activation)]
        return [Sublayer(*given) for given in zip(before, parts, after or (None, None), strict=True)]

    def norm(self, norm: nn.Module) -> Norm:
        if not _from_transformers(norm):
            return super().norm(norm)
        if type(norm).__name__ == "Gemma2RMSNorm":
            return Norm(cast(float, norm.eps), plus=1.0)
        eps = getattr(norm, "variance_epsilon", None)
        if not isinstance(eps, float):
            raise Unfit(f"a norm is a {type(norm).__name__}")
        return Norm(eps)

    def embedding_scale(self, table: nn.Module) -> float:
        if type(table).__name__ == "Gemma2TextScaledWordEmbedding" and _from_transformers(table):
            return float(cast(Tensor, table.embed_scale))
        return super().embedding_scale(table)


def _from_transformers(module: nn.Module) -> bool:
    """Whether a module is what its family says, and not something that was put in its place."""
    return type(module).__module__.startswith("transformers.models.")
