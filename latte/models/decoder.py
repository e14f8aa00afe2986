"""The model: embedding, blocks and a norm, generic over mixers; and the language model on top of it."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from latte.layers.feeds import Feed
from latte.layers.linear import TokenLinear
from latte.layers.marks import marks_of
from latte.mixers import Mixer
from latte.models.attention_choice import NoAttentionChoice
from latte.models.blocks import Block, Carried, build_norm
from latte.models.cache import LatteCache
from latte.models.causal_lm import CausalLM, Read
from latte.models.config import LatteConfig
from latte.models.engine import Anatomy, new_engine
from latte.models.inputs import embed, given_tokens, resets_of, tokens_of
from latte.models.quantize import make_quantized
from latte.models.stream import Layers, Stream
from latte.modes import values_hidden
from latte.tokens import Tokens


class LattePreTrainedModel(NoAttentionChoice):
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

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Weights that are loaded in another dtype than the model's: those marked to stay in float32."""
        plan = super()._get_dtype_plan(dtype)
        if dtype in (torch.float16, torch.bfloat16):
            kept = [name for name, mark in marks_of(self).items() if mark.float32]
            plan |= dict.fromkeys(kept, torch.float32)
        return plan


class LatteModel(LattePreTrainedModel):
    """Token ids to hidden states; causal with a state, or bidirectional without one."""

    anatomy = Anatomy()

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_positions = None
        if config.position_embedding == "learned":
            self.embed_positions = nn.Embedding(cast(int, config.max_position_embeddings), config.hidden_size)
        self.embed_norm = build_norm(config) if config.embedding_norm else None
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = build_norm(config)
        self.gradient_checkpointing = False
        self._engine = new_engine(self.anatomy)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        reset: Tensor | None = None,
        past_key_values: LatteCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: Layers = None,
        output_attentions: bool | None = None,
        position_ids: Tensor | None = None,
        **keywords: Any,
    ) -> BaseModelOutputWithPast:
        """Read tokens, after those that ``past_key_values`` has read.

        ``attention_mask`` (B, T, or longer with a cache: its last T columns count) is 0 at padding, anywhere in the
        row; ``reset`` (B, T) is True at the first token of a document, anywhere in the row, and so say ``position_ids``
        that start again at 0. ``output_hidden_states`` may be a list of layers.

        Raises:
            ValueError: not exactly one of ids and embeddings, masks that do not fit, positions that skip, an unknown
                keyword, a cache of another model or batch, or a document longer than the table of learned positions.
        """
        cache = past_key_values
        given_BT = given_tokens(input_ids, inputs_embeds)
        reset = resets_of(self, given_BT, attention_mask, reset, position_ids, cache, keywords)
        if use_cache is None:
            use_cache = cache is not None or (self.config.use_cache and not self.training)
        if use_cache and cache is None and not self.config.bidirectional:
            cache = LatteCache()
        x_BTD = embed(self.embed_tokens, input_ids, inputs_embeds)
        tokens = tokens_of(x_BTD, attention_mask, reset, cache)
        if self.embed_positions is not None:
            x_BTD = x_BTD + self.embed_positions(self._known_places(tokens))
        if self.embed_norm is not None:
            x_BTD = self.embed_norm(x_BTD)
        x_BTD = self.dropout(x_BTD)
        wants_stream = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        wants_weights = self.config.output_attentions if output_attentions is None else output_attentions
        hidden_BTD = None
        stream = Stream(wants_stream, len(self.layers))
        if cache is not None and tokens.plain and not (stream.asked or wants_weights):
            hidden_BTD = self._engine.hidden(self, x_BTD, cache)
        read = (
            Read(hidden_BTD)
            if hidden_BTD is not None
            else self._read_layers(x_BTD, tokens, cache, stream, bool(wants_weights))
        )
        return BaseModelOutputWithPast(
            last_hidden_state=cast("torch.FloatTensor", read.hidden_BTD),
            past_key_values=cache if use_cache else None,
            hidden_states=cast(Any, read.stream),
            attentions=cast(Any, read.weights),
        )

    def _read_layers(
        self, x_BTD: Tensor, tokens: Tokens, cache: LatteCache | None, stream: Stream, wants_weights: bool
    ) -> Read:
        """Through all blocks and the last norm, the cache advanced."""
        before = None if cache is None else cache.states_for(x_BTD, len(self.layers))
        after, weights = [], []
        carried: Carried = {}
        block: Any
        for index, block in enumerate(self.layers):
            stream.add(x_BTD)
            if wants_weights:
                weights.append(block.attention_weights(x_BTD, tokens))
            x_BTD, states, carried = block(x_BTD, None if before is None else before[index], tokens, carried)
            after.append(states)
        hidden_BTD = self.norm(x_BTD)
        stream.add(hidden_BTD)
        if cache is not None:  # last, so that a call that fails has read nothing
            cache.advance(tuple(after), tokens)
        return Read(hidden_BTD, stream.given(), tuple(weights) if wants_weights else None)

    def _known_places(self, tokens: Tokens) -> Tensor:
        """Places as indices of the table; padding before the first token counts as place 0."""
        limit, place_BT = self.config.max_position_embeddings, tokens.place_BT
        if not values_hidden(place_BT) and int(place_BT.max()) >= limit:
            raise ValueError(
                f"a document reaches place {int(place_BT.max())}, but learned positions end at "
                f"max_position_embeddings ({limit})"
            )
        return place_BT.clamp(min=0)


class LatteForCausalLM(LattePreTrainedModel, CausalLM, GenerationMixin):
    """A language model that reads with linear cost and, with a recurrent mixer, decodes from a state of one size."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  (the base class declares it so)

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        if config.bidirectional:
            raise ValueError("config.bidirectional is True, expected False: a language model must not see the future")
        self.model = LatteModel(config)
        self.lm_head = TokenLinear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
        if config.quantized:
            make_quantized(self, config.quantized)

    @property
    def body(self) -> LatteModel:
        return self.model

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
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            reset=reset,
            past_key_values=cache,
            inputs_embeds=inputs_embeds,
            use_cache=cache is not None,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        return Read(outputs.last_hidden_state, outputs.hidden_states, outputs.attentions)

    def flops_per_token(self, context: int = 0) -> int:
        """Floating-point operations of one token's forward pass, ``context`` tokens behind it."""
        total = 2 * self.lm_head.weight.numel()
        for block in self.model.layers:
            matrices = sum(weight.numel() for mlp in block.mlps for weight in mlp.parameters() if weight.dim() > 1)
            total += sum(mixer.flops_per_token(context) for mixer in block.mixers) + 2 * matrices
        return total
