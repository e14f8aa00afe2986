"""An extended model: a pretrained one whose layers read through :class:`ExtendedAttention` and carry a state."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from latte.extend.config import LatteExtendedConfig
from latte.extend.families import family_of
from latte.extend.layer import ExtendedAttention, ExtendedMixer, Reading, extend_layer
from latte.extend.step import ExtendedPlanMaker
from latte.mixers import Mixer
from latte.mixers.feeds import Feed
from latte.mixers.layers import PretrainedLinear
from latte.mixers.rotary import Rotary
from latte.models.cache import LatteCache
from latte.models.decoder import padding_mask, token_logits
from latte.models.loss import next_token_loss
from latte.models.step import TokenStep
from latte.shapes import Axes


class LatteExtendedForCausalLM(PreTrainedModel, GenerationMixin):
    """A pretrained language model that reads at linear cost and decodes from a state of one size."""

    config_class = LatteExtendedConfig
    base_model_prefix = "base"
    supports_gradient_checkpointing = True
    _is_stateful = True
    _no_split_modules = ["ExtendedAttention"]  # noqa: RUF012  (the base class declares both so)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    def __init__(self, config: LatteExtendedConfig, base: Any = None) -> None:
        """An extended model; around ``base``, a loaded pretrained model whose layers become its own, if it is given."""
        super().__init__(config)
        inner = config.original_config()
        self.family = family_of(inner)
        self._step = TokenStep(ExtendedPlanMaker)
        self.base = AutoModelForCausalLM.from_config(inner) if base is None else base
        for index, layer in enumerate(self.base.model.layers):
            layer.self_attn = extend_layer(layer.self_attn, index, self.family, inner, config.options or {})
            if base is not None:
                self._fill(layer.self_attn.mixer)
        PretrainedLinear.take_over(self.base)
        if base is None:
            self.post_init()
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
        old = {id(parameter) for mixer in self.mixers for parameter in mixer.near.attention.parameters()}
        return {
            name: parameter
            for name, parameter in self.named_parameters()
            if ".self_attn.mixer." in name and id(parameter) not in old
        }

    @torch.no_grad()
    def _fill(self, mixer: ExtendedMixer) -> None:
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

    @property
    def output_weight(self) -> Tensor:
        """(vocabulary, width): hidden states times this are logits, before the model's finish."""
        return cast(Tensor, self.get_output_embeddings().weight)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        reset: Tensor | None = None,
        past_key_values: LatteCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool | None = None,
        **__: Any,
    ) -> CausalLMOutputWithPast:
        """As :meth:`LatteForCausalLM.forward`: logits of the next token, or with ``labels`` the loss."""
        if use_cache is None:
            use_cache = past_key_values is not None or (
                labels is None and not self.training and bool(self.config.use_cache)
            )
        cache = past_key_values
        if use_cache and cache is None:
            cache = LatteCache()
        plain = reset is None and inputs_embeds is None and labels is None
        if plain and cache is not None and input_ids is not None and return_logits is not False:
            self._tell_rotary()
            ends = self.base.model, self.get_output_embeddings()
            logits = token_logits(self._step, *ends, input_ids, attention_mask, cache, logits_to_keep)
            if logits is not None:
                return CausalLMOutputWithPast(
                    logits=cast("torch.FloatTensor", self.finish_logits(logits)),
                    past_key_values=cache if use_cache else None,
                )
        hidden_BTD, _ = self.read(input_ids, attention_mask, reset, cache, inputs_embeds)
        loss = None
        if labels is not None:
            loss = next_token_loss(
                hidden_BTD,
                self.output_weight,
                labels,
                mask=padding_mask(attention_mask, hidden_BTD),
                reset=reset,
                num_items=num_items_in_batch,
                finish=self.finish_logits,
            )
        logits = None
        if return_logits or (return_logits is None and labels is None):
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.logits(hidden_BTD[:, kept])
        return CausalLMOutputWithPast(
            loss=cast("torch.FloatTensor | None", loss),
            logits=cast("torch.FloatTensor | None", logits),
            past_key_values=cache if use_cache else None,
        )

    def read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None = None,
        reset: Tensor | None = None,
        cache: LatteCache | None = None,
        inputs_embeds: Tensor | None = None,
        mode: str = "extended",
        share: float | None = None,
    ) -> tuple[Tensor, Reading]:
        """Hidden states after the last norm, and what the layers left; ``mode`` is that of :class:`Reading`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("both or neither of input_ids and inputs_embeds were given, expected exactly one")
        body = self.base.model
        x_BTD = body.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        mask = padding_mask(attention_mask, x_BTD)
        axes = Axes("model")
        axes.bind("input", x_BTD, "BTD")
        axes.flags("reset", reset)
        self._tell_rotary()
        if cache is not None and mask is None and reset is None and mode == "extended":
            hidden_BTD = self._step.hidden(body, x_BTD, cache)
            if hidden_BTD is not None:
                return hidden_BTD, Reading(mask, reset, None, share=share)
        before = None if cache is None else cache.states_for(x_BTD, len(body.layers))
        reading = Reading(mask, reset, before, mode=cast(Any, mode), share=share)
        for layer in body.layers:
            x_BTD = layer(x_BTD, attention_mask=None, position_embeddings=None, reading=reading)
        hidden_BTD = body.norm(x_BTD)
        if cache is not None:
            cache.advance(tuple(reading.after[index] for index in range(len(body.layers))), x_BTD, mask, reset)
        return hidden_BTD, reading

    def logits(self, hidden: Tensor) -> Tensor:
        return self.finish_logits(self.get_output_embeddings()(hidden))

    def finish_logits(self, logits: Tensor) -> Tensor:
        return self.family.finish_logits(logits, self.base.config)

    def _tell_rotary(self) -> None:
        """Layers turn queries and keys as the pretrained model's own module would, whatever the place."""
        if self.base.model.layers[0].self_attn.mixer.near._rotary is None:
            module = self.base.model.rotary_emb
            frequencies, known = module.inv_freq.double().tolist(), int(self.base.config.max_position_embeddings)
            rotary = Rotary(tuple(frequencies), float(module.attention_scaling), rounded_below=known)
            for mixer in self.mixers:
                mixer.near.tell_rotary(rotary)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward makes its own


AutoConfig.register(LatteExtendedConfig.model_type, LatteExtendedConfig, exist_ok=True)
AutoModelForCausalLM.register(LatteExtendedConfig, LatteExtendedForCausalLM, exist_ok=True)


def convert(original: Any, options: dict[str, Any]) -> LatteExtendedForCausalLM:
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
    config = LatteExtendedConfig(original=fields, options=options)
    model = LatteExtendedForCausalLM(config, original)
    model.generation_config = original.generation_config
    return model.train(original.training)
