"""What a family of pretrained models has to say about itself, so that its attention can become slot 0 of a Latte layer.

Another family is one short file beside this one: a subclass that overrides what differs, and :func:`register`.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from latte.errors import UserError
from latte.layers.linear import split_heads
from latte.layers.rotary import Rotary

#: Rotary encodings whose frequencies stay the same whatever the length of the text.
STEADY_ROTARY = ("default", "linear", "llama3", "yarn")


class Shape(NamedTuple):
    """x + attention(norm(x)), then x + mlp(norm(x)) with a gated MLP; the names of its norms in a layer."""

    before: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")  # of attention and of the MLP
    after: tuple[str, str] | None = None  # norms of what attention and MLP add
    heads: tuple[str, str] | None = None  # norms of queries and keys, in the attention module


class Family:
    """Attention with grouped heads and rotary encoding, in layers called ``model.layers[i].self_attn``: Llama's shape.

    ``attention`` is a layer's own attention module, ``config`` the pretrained model's configuration.
    """

    #: ``config.model_type`` of the models that this describes.
    model_types: tuple[str, ...] = ()
    #: How a layer is put together, where one native program may stand for it when the model writes; None: by modules.
    shape: ClassVar[Shape | None] = None

    def refusal(self, config: Any) -> str | None:
        """Why a model of this family can't be converted; None if it can."""
        for kind in self.rotary_kinds(config):
            if kind not in STEADY_ROTARY:
                known = ", ".join(STEADY_ROTARY)
                return f"its rotary encoding is {kind!r}, which depends on the text's length, expected one of {known}"
        return None

    def rotary_kinds(self, config: Any) -> list[str]:
        """The kinds of rotary encoding that its layers have."""
        return [(getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")]

    def rotary(self, module: Any, config: Any, layer: int) -> Rotary | None:
        """How a layer turns queries and keys, None if it does not; ``module`` is the model's own rotary encoding."""
        return self.turning(module.inv_freq, module.attention_scaling, config)

    def turning(self, frequencies_K: Tensor, stretch: float, config: Any) -> Rotary:
        """Frequencies in the precision that the pretrained model starts with."""
        known = int(config.max_position_embeddings)
        return Rotary(tuple(frequencies_K.double().tolist()), float(stretch), rounded_below=known)

    def enter(self, x_BTD: Tensor, config: Any) -> Tensor:
        """What the model does to embeddings before the first layer."""
        return x_BTD

    def heads(self, config: Any) -> tuple[int, int, int]:
        """Query heads, key-value heads, and the width of each."""
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads, width

    def scale(self, config: Any) -> float:
        """What queries times keys are multiplied by."""
        return self.heads(config)[2] ** -0.5

    def softcap(self, config: Any) -> float | None:
        """The cap of attention logits."""
        return None

    def own_window(self, config: Any, layer: int) -> int | None:
        """How many tokens before the present one a layer sees; None: all."""
        size = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if size is None or (kinds is not None and kinds[layer] != "sliding_attention"):
            return None
        return size - 1

    def queries_and_keys(self, attention: Any, x_BTD: Tensor, config: Any) -> tuple[Tensor, Tensor]:
        """(B, T, H, K) and (B, T, G, K), before the rotary encoding."""
        heads, groups, _ = self.heads(config)
        return split_heads(attention.q_proj(x_BTD), heads), split_heads(attention.k_proj(x_BTD), groups)

    def values(self, attention: Any, x_BTD: Tensor, config: Any) -> Tensor:
        """(B, T, G, V)."""
        return split_heads(attention.v_proj(x_BTD), self.heads(config)[1])

    def output(self, attention: Any, y_BTHV: Tensor) -> Tensor:
        """From heads back to the model's width."""
        return attention.o_proj(y_BTHV.flatten(2))

    def finish_logits(self, logits: Tensor, config: Any) -> Tensor:
        """What the model does to its logits in the end."""
        return logits


_FAMILIES: dict[str, Family] = {}


def register(family: type[Family]) -> type[Family]:
    """Class decorator that makes a family known by its model types."""
    for model_type in family.model_types:
        _FAMILIES[model_type] = family()
    return family


def family_of(config: Any) -> Family:
    """The family of a pretrained model.

    Raises:
        UserError: there is none, or this model can't be converted; the sentence says why.
    """
    found = _FAMILIES.get(config.model_type)
    if found is None:
        known = ", ".join(sorted(_FAMILIES))
        raise UserError(f"a model of type {config.model_type!r} can't be extended, expected one of {known}")
    reason = found.refusal(config)
    if reason is not None:
        raise UserError(f"this {config.model_type} model can't be extended: {reason}")
    return found
