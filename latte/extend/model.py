"""An extended model: a pretrained one whose layers read through :class:`ExtendedAttention` and carry a state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin

from latte.extend.anatomy import ExtendedAnatomy
from latte.extend.config import LatteExtendedConfig
from latte.extend.families import family_of
from latte.extend.layer import ExtendedAttention, ExtendedMixer, Reading, extend_layer
from latte.layers.feeds import Feed
from latte.layers.linear import TokenLinear
from latte.mixers import Mixer
from latte.models.cache import LatteCache
from latte.models.causal_lm import CausalLM, Read
from latte.models.inputs import embed, tokens_of
from latte.models.loss import is_product
from latte.models.quantize import make_quantized
from latte.models.stream import Layers, Stream
from latte.tokens import Tokens


class LatteExtendedForCausalLM(CausalLM, GenerationMixin):
    """A pretrained language model that reads at linear cost and decodes from a state of one size."""

    config_class = LatteExtendedConfig
    base_model_prefix = "base"
    supports_gradient_checkpointing = True
    anatomy = ExtendedAnatomy()
    _tied_weights_keys = {"base.lm_head.weight": "base.model.embed_tokens.weight"}  # noqa: RUF012  (as the base class)
    _no_split_modules = ["ExtendedAttention"]  # noqa: RUF012  (the base class declares it so)

    def __init__(self, config: LatteExtendedConfig, base: Any = None) -> None:
        """An extended model; around ``base``, a loaded pretrained model whose layers become its own, if it is given."""
        super().__init__(config)
        inner = config.original_config()
        self.family = family_of(inner)
        self.base = AutoModelForCausalLM.from_config(inner) if base is None else base
        for index, layer in enumerate(self.base.model.layers):
            layer.self_attn = extend_layer(
                layer.self_attn, index, self.family, inner, config.options or {}, index in (config.full_layers or ())
            )
            if base is not None:
                self.reset_new(layer.self_attn.mixer)
        self._set_rotary()  # here, since a compiled call can't read numbers
        TokenLinear.take_over(self.base)
        if base is None:
            self.post_init()
            if config.quantized:
                make_quantized(self, config.quantized)
        else:
            self.base.tie_weights()

    @property
    def mixers(self) -> list[ExtendedMixer]:
        return [layer.self_attn.mixer for layer in self.base.model.layers]

    @property
    def own_context(self) -> int:
        """How many tokens the pretrained model was made for."""
        return int(getattr(self.base.config, "max_position_embeddings", 0) or 0)

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """What extending added, by name."""
        old = {id(parameter) for mixer in self.mixers for parameter in mixer.pretrained.attention.parameters()}
        return {
            name: parameter
            for name, parameter in self.named_parameters()
            if ".self_attn.mixer." in name and id(parameter) not in old
        }

    @torch.no_grad()
    def reset_new(self, mixer: ExtendedMixer) -> None:
        """Start what extending added to a layer."""
        for module in mixer.modules():
            if isinstance(module, Mixer | Feed):
                module.reset_parameters()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Mixer | Feed):
            module.reset_parameters()
        elif not isinstance(module, ExtendedAttention):
            self.base._init_weights(module)

    def get_input_embeddings(self) -> nn.Module:
        return self.base.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.base.get_output_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base.set_input_embeddings(value)

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.base.set_output_embeddings(value)

    @property
    def output_weight(self) -> Tensor:
        """(vocabulary, width): hidden states times this are logits, before the model's finish.

        Raises:
            ValueError: the head computes more than this product.
        """
        head = self.get_output_embeddings()
        if not is_product(head):
            raise ValueError(
                f"the output head is a {type(head).__name__} with an adapter, hook or bias, expected a plain product"
            )
        return cast(Tensor, head.weight)

    @property
    def body(self) -> nn.Module:
        return self.base.model

    def read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        reset: Tensor | None = None,
        cache: LatteCache | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: Layers = None,
        output_attentions: bool | None = None,
    ) -> Read:
        stream = Stream(output_hidden_states, len(self.base.model.layers))
        weights: dict[int, Tensor] | None = {} if output_attentions else None
        hidden_BTD, _ = self.read_as(
            "extended", input_ids, attention_mask, reset, cache, inputs_embeds, stream=stream, weights=weights
        )
        return Read(
            hidden_BTD,
            stream.given(),
            None if weights is None else tuple(weights[layer] for layer in sorted(weights)),
        )

    def read_as(
        self,
        mode: str,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        reset: Tensor | None = None,
        cache: LatteCache | None = None,
        inputs_embeds: Tensor | None = None,
        share: float | None = None,
        stream: Stream | None = None,
        weights: dict[int, Tensor] | None = None,
        visit: Callable[[ExtendedMixer, Tensor, Tokens], None] | None = None,
        alone: int | None = None,
    ) -> tuple[Tensor, Reading]:
        """Hidden states after the last norm, and what the layers left; ``mode`` is that of :class:`Reading`.

        Without a cache ``alone`` may name the only layer that is read so.

        Hidden states that were asked for go into ``stream``, attention weights into ``weights``.
        """
        body: Any = self.body
        stream = Stream(False, len(body.layers)) if stream is None else stream
        x_BTD = self.family.enter(embed(body.embed_tokens, input_ids, inputs_embeds), self.base.config)
        tokens = tokens_of(x_BTD, attention_mask, reset, cache)
        if cache is not None and tokens.plain and mode == "extended" and not stream.asked and weights is None:
            hidden_BTD = self._engine.hidden(body, x_BTD, cache)
            if hidden_BTD is not None:
                return hidden_BTD, Reading(tokens, None)
        before = None if cache is None else cache.states_for(x_BTD, len(body.layers))
        reading = Reading(tokens, before, mode=cast(Any, mode), share=share, weights=weights, visit=visit, alone=alone)
        for layer in body.layers:
            stream.add(x_BTD)
            x_BTD = layer(x_BTD, attention_mask=None, position_embeddings=None, reading=reading)
        hidden_BTD = body.norm(x_BTD)
        stream.add(hidden_BTD)
        if cache is not None:  # last, so that a call that fails has read nothing
            cache.advance(tuple((reading.after[index],) for index in range(len(body.layers))), tokens)
        return hidden_BTD, reading

    def finish_logits(self, logits: Tensor) -> Tensor:
        return self.family.finish_logits(logits, self.base.config)

    def _set_rotary(self) -> None:
        """Layers turn queries and keys as the pretrained model's own module would, whatever the place."""
        with torch.device("cpu"):  # a model that is being loaded has no numbers yet
            module = type(self.base.model.rotary_emb)(self.base.config)
        for mixer in self.mixers:
            mixer.pretrained.set_rotary(self.family.rotary(module, self.base.config, mixer.layer))


AutoConfig.register(LatteExtendedConfig.model_type, LatteExtendedConfig, exist_ok=True)
AutoModelForCausalLM.register(LatteExtendedConfig, LatteExtendedForCausalLM, exist_ok=True)


def convert(original: Any, options: dict[str, Any], full_layers: Sequence[int] = ()) -> LatteExtendedForCausalLM:
    """A loaded pretrained model as an extended one, in place: its weights are used, not copied.

    It computes what the pretrained one computes on the window and the sinks alone, until its latents are trained.

    Raises:
        UserError: a model that can't be extended; the sentence says why.
    """
    fields = original.config.to_dict()
    for name in (
        "_name_or_path",
        "transformers_version",
        "dtype",
        "torch_dtype",
        "quantization_config",
        "architectures",
    ):
        fields.pop(name, None)
    family_of(original.config)
    config = LatteExtendedConfig(original=fields, options=options, full_layers=list(full_layers) or None)
    model = LatteExtendedForCausalLM(config, original)
    model.generation_config = original.generation_config
    return model.train(original.training)
