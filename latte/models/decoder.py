"""The model: embedding, blocks and a norm, generic over mixers; and the language model on top of it."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from latte.mixers import Mixer
from latte.mixers.feeds import Feed
from latte.mixers.layers import project_token
from latte.models.blocks import Block, build_norm
from latte.models.cache import LatteCache
from latte.models.config import LatteConfig
from latte.models.loss import next_token_loss
from latte.models.step import TokenStep
from latte.ops.tokens import positions
from latte.shapes import Axes


class LattePreTrainedModel(PreTrainedModel):
    """How weights start, and what transformers needs to know of every model here."""

    config_class = LatteConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012  (the base class declares both so)
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """N(0, initializer_range); the last projections before the residual stream smaller, by 1/sqrt(2 * layers)."""
        std = self.config.initializer_range
        if isinstance(module, Mixer | Feed):
            module.reset_parameters()
        elif isinstance(module, nn.Linear) and getattr(module, "residual", False):
            init.normal_(module.weight, std=std / math.sqrt(2 * self.config.num_hidden_layers))
            if module.bias is not None:
                init.zeros_(module.bias)
        else:
            super()._init_weights(module)


class LatteModel(LattePreTrainedModel):
    """Token ids to hidden states; causal with a state, or bidirectional without one."""

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = None
        if config.position_embedding == "learned":
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = build_norm(config)
        self.gradient_checkpointing = False
        self._step = TokenStep()
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        reset: Tensor | None = None,
        past_key_values: LatteCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **__: Any,
    ) -> BaseModelOutputWithPast:
        """Read tokens, after those that ``past_key_values`` has read.

        ``attention_mask`` (B, T, or longer with a cache: its last T columns count) is 0 at padding, anywhere in the
        row; ``reset`` (B, T) is True at the first token of a document, anywhere in the row.

        Raises:
            ValueError: not exactly one of ids and embeddings, masks that do not fit, a cache of another model or batch,
                or a document longer than the table of learned positions.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("both or neither of input_ids and inputs_embeds were given, expected exactly one")
        x_BTD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        mask = padding_mask(attention_mask, x_BTD)
        axes = Axes("model")
        axes.bind("input", x_BTD, "BTD")
        axes.flags("reset", reset)
        cache = past_key_values
        if use_cache is None:
            use_cache = cache is not None or (self.config.use_cache and not self.training)
        if use_cache and cache is None and not self.config.bidirectional:
            cache = LatteCache()
        if self.embed_positions is not None:
            place_BT, _ = positions(x_BTD, mask, reset, (LatteCache() if cache is None else cache).count_for(x_BTD))
            x_BTD = x_BTD + self.embed_positions(self._known_places(place_BT))
        x_BTD = self.dropout(x_BTD)
        hidden = [x_BTD] if output_hidden_states else None
        stepped = None
        if cache is not None and mask is None and reset is None and hidden is None:
            stepped = self._step.hidden(self, x_BTD, cache)
        if stepped is not None:
            x_BTD = stepped
        else:
            before, states = None if cache is None else cache.states_for(x_BTD, len(self.layers)), []
            for index, block in enumerate(self.layers):
                x_BTD, after = block(x_BTD, None if before is None else before[index], mask, reset)
                states.append(after)
                if hidden is not None:
                    hidden.append(x_BTD)
            x_BTD = self.norm(x_BTD)
            if cache is not None:
                cache.advance(tuple(states), x_BTD, mask, reset)
        return BaseModelOutputWithPast(
            last_hidden_state=cast("torch.FloatTensor", x_BTD),
            past_key_values=cache if use_cache else None,
            hidden_states=None if hidden is None else tuple(hidden),
        )

    def _known_places(self, place_BT: Tensor) -> Tensor:
        """Places as indices of the table; padding before the first token counts as place 0."""
        limit = self.config.max_position_embeddings
        if not torch.compiler.is_compiling() and int(place_BT.max()) >= limit:
            raise ValueError(
                f"a document reaches place {int(place_BT.max())}, but learned positions end at "
                f"max_position_embeddings ({limit})"
            )
        return place_BT.clamp(min=0)


class LatteForCausalLM(LattePreTrainedModel, GenerationMixin):
    """A language model that reads with linear cost and, with a recurrent mixer, decodes from a state of one size."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  (the base class declares it so)

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        if config.bidirectional:
            raise ValueError("config.bidirectional is True, expected False: a language model must not see the future")
        self.model = LatteModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._step = TokenStep()
        self.post_init()

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
        output_hidden_states: bool | None = None,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token, or with ``labels`` the loss.

        Labels are shifted here; -100, padding and each document's first token are not predicted. With labels the logits
        are left out, since the loss never forms them whole: ``return_logits=True`` asks for them all the same.
        ``logits_to_keep`` keeps those of the last tokens only. See :meth:`LatteModel.forward` for the rest.
        """
        plain = reset is None and inputs_embeds is None and labels is None and not output_hidden_states
        if plain and past_key_values is not None and input_ids is not None and return_logits is not False:
            ends = self.model, self.lm_head
            logits = token_logits(self._step, *ends, input_ids, attention_mask, past_key_values, logits_to_keep)
            if logits is not None:
                cache = None if use_cache is False else past_key_values
                return CausalLMOutputWithPast(logits=cast("torch.FloatTensor", logits), past_key_values=cache)
        if use_cache is None and labels is not None and past_key_values is None:
            use_cache = False
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            reset=reset,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        hidden_BTD = outputs.last_hidden_state
        loss = None
        if labels is not None:
            if labels.shape != hidden_BTD.shape[:2]:
                wanted = tuple(hidden_BTD.shape[:2])
                raise ValueError(f"labels has shape {tuple(labels.shape)}, expected {wanted}")
            loss = next_token_loss(
                hidden_BTD,
                self.lm_head.weight,
                labels,
                mask=padding_mask(attention_mask, hidden_BTD),
                reset=reset,
                num_items=num_items_in_batch,
            )
        logits = None
        if return_logits or (return_logits is None and labels is None):
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = project_token(hidden_BTD[:, kept], self.lm_head)
        return CausalLMOutputWithPast(
            loss=cast("torch.FloatTensor | None", loss),
            logits=cast("torch.FloatTensor | None", logits),
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def flops_per_token(self, context: int = 0) -> int:
        """Floating-point operations of one token's forward pass, ``context`` tokens behind it."""
        blocks = 0
        for block in self.model.layers:
            matrices = sum(weight.numel() for weight in block.mlp.parameters() if weight.dim() > 1)
            blocks += block.mixer.flops_per_token(context) + 2 * matrices
        return blocks + 2 * self.lm_head.weight.numel()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward makes its own


def token_logits(
    step: TokenStep,
    body: nn.Module,
    head: nn.Module,
    ids_BT: Tensor,
    attention_mask: Tensor | None,
    cache: LatteCache,
    keep: int | Tensor,
) -> Tensor | None:
    """Logits behind one token a row in one native call, the cache advanced; None where modules have to be called."""
    if ids_BT.dim() != 2 or ids_BT.shape[1] != 1 or not isinstance(keep, int) or keep < 0:
        return None
    if padding_mask(attention_mask, ids_BT) is not None:
        return None
    return step.logits(body, head, ids_BT, cache)


def padding_mask(attention_mask: Tensor | None, tokens: Tensor) -> Tensor | None:
    """The (B, T) boolean mask of these tokens, or None where none is padding."""
    if attention_mask is None:
        return None
    B, T = tokens.shape[:2]
    if attention_mask.dim() != 2 or attention_mask.shape[0] != B or attention_mask.shape[1] < T:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, expected ({B}, {T}), or more columns with a cache"
        )
    mask = attention_mask[:, attention_mask.shape[1] - T :].to(torch.bool)
    # Without padding every op has a shorter way; while compiling, looking would break the graph.
    return None if not torch.compiler.is_compiling() and bool(mask.all()) else mask
