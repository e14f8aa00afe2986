"""What every causal language model here does around its layers: cache, loss and logits."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from latte.models.attention_choice import NoAttentionChoice
from latte.models.cache import LatteCache
from latte.models.engine import Anatomy, new_engine
from latte.models.inputs import given_tokens, padding_mask, resets_of
from latte.models.loss import logits_loss, mean_loss, next_token_targets, summed_loss
from latte.models.quantize import quantize_model, tie_blocks
from latte.models.stream import Layers
from latte.tokens import Tokens


class Read(NamedTuple):
    """What layers made of tokens.

    Attributes:
        hidden_BTD: hidden states after the last norm.
        stream: if asked for, what :class:`Stream` gives.
        weights: if asked for, each layer's attention weights (B, H, T, S).
    """

    hidden_BTD: Tensor
    stream: tuple[Tensor | None, ...] | None = None
    weights: tuple[Tensor, ...] | None = None


class CausalLM(NoAttentionChoice, GenerationMixin):
    """A language model that decodes from a :class:`LatteCache`. Subclasses define :meth:`read`."""

    anatomy = Anatomy()
    #: ``forward`` takes ``reset``, the first tokens of documents.
    takes_documents = True
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012  (the base class declares it so)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._engine = new_engine(self.anatomy)

    @property
    def body(self) -> nn.Module:
        """Embedding, layers and last norm."""
        raise NotImplementedError("an abstract property: every language model defines it")

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
        """Read tokens behind those of the cache, and advance it."""
        raise NotImplementedError("an abstract method: every language model defines it")

    def finish_logits(self, logits: Tensor) -> Tensor:
        """What the model does to its logits in the end."""
        return logits

    @can_return_tuple
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
        output_hidden_states: Layers = None,
        output_attentions: bool | None = None,
        position_ids: Tensor | None = None,
        **keywords: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token, and with ``labels`` the loss.

        ``attention_mask`` (B, T, or longer with a cache: its last T columns count) is 0 at padding, anywhere in the
        row; ``reset`` (B, T) is True at the first token of a document, anywhere in the row, and so say ``position_ids``
        that start again at 0. Labels are shifted here (``shift_labels`` are not); -100, padding and each document's
        first token are not predicted. In training the logits are left out beside labels, since the loss never forms
        them whole: ``return_logits=True``, here or in the configuration, asks for them. ``logits_to_keep`` keeps those
        of the last tokens only. ``output_hidden_states`` may be a list of layers.

        Raises:
            ValueError: not exactly one of ids and embeddings, masks or labels that do not fit, positions that skip, an
                unknown keyword, or a cache of another model or batch.
            NotImplementedError: an export to ONNX.
        """
        if torch.onnx.is_in_onnx_export():
            raise NotImplementedError(
                "these models have no ONNX form, expected torch.export instead of torch.onnx.export"
            )
        # Not among the arguments: Trainer takes every argument named after labels for one that each batch has.
        shift_labels = keywords.pop("shift_labels", None)
        config, cache, learns = self.config, past_key_values, labels is not None or shift_labels is not None
        given_BT = given_tokens(input_ids, inputs_embeds)
        reset = resets_of(self, given_BT, attention_mask, reset, position_ids, cache, keywords)
        if use_cache is None:
            use_cache = cache is not None or (bool(config.use_cache) and not (self.training or learns))
        cache = LatteCache() if cache is None and use_cache else cache
        if cache is not None and cache.is_recording_past():
            cache.about_to_read(partial(self._read_again, input_ids, attention_mask, reset, cache, inputs_embeds))
        wants_stream = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        wants_weights = config.output_attentions if output_attentions is None else output_attentions
        plain = reset is None and inputs_embeds is None and not (learns or wants_stream or wants_weights)
        if plain and cache is not None and input_ids is not None and return_logits is not False:
            logits = self._decode(input_ids, attention_mask, cache, logits_to_keep)
            if logits is not None:
                return _output(None, logits, cache if use_cache else None)
        read = self.read(input_ids, attention_mask, reset, cache, inputs_embeds, wants_stream, wants_weights)
        logits = None
        if self._wants_logits(return_logits, learns):
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.logits(read.hidden_BTD[:, kept])
        loss = None
        if learns:
            tokens = Tokens.of(given_BT, mask=padding_mask(attention_mask, given_BT), reset=reset)
            loss = self._loss(read.hidden_BTD, logits, labels, shift_labels, tokens, num_items_in_batch)
        return _output(loss, logits, cache if use_cache else None, read)

    def _read_again(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        reset: Tensor | None,
        cache: LatteCache,
        inputs_embeds: Tensor | None,
        tokens: int,
    ) -> None:
        """Read the first ``tokens`` of a call, and advance the cache."""
        left_out = given_tokens(input_ids, inputs_embeds).shape[1] - tokens

        def kept(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:, : x.shape[1] - left_out]

        with torch.no_grad():
            self.read(kept(input_ids), kept(attention_mask), kept(reset), cache, kept(inputs_embeds))

    def _wants_logits(self, asked: bool | None, learns: bool) -> bool:
        if asked is None:
            asked = getattr(self.config, "return_logits", None)
        return not (learns and self.training) if asked is None else asked

    def _loss(
        self,
        hidden_BTD: Tensor,
        logits: Tensor | None,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        tokens: Tokens,
        num_items: Tensor | int | None,
    ) -> Tensor:
        """Mean next-token loss, from the logits where they are all there, otherwise block by block."""
        name, given_BT = ("labels", labels) if shift_labels is None else ("shift_labels", shift_labels)
        assert given_BT is not None
        if given_BT.shape != hidden_BTD.shape[:2]:
            raise ValueError(f"{name} has shape {tuple(given_BT.shape)}, expected {tuple(hidden_BTD.shape[:2])}")
        shifted = shift_labels is not None
        targets_BT = given_BT if shifted else next_token_targets(given_BT, tokens)
        predicting, targets_N = targets_BT.shape[1], targets_BT.flatten()
        if logits is not None and logits.shape[1] == hidden_BTD.shape[1]:
            total = logits_loss(logits[:, :predicting].flatten(0, 1), targets_N)
        else:
            finish = None if type(self).finish_logits is CausalLM.finish_logits else self.finish_logits
            hidden_ND = hidden_BTD[:, :predicting].flatten(0, 1)
            total = summed_loss(self.get_output_embeddings(), hidden_ND, targets_N, finish)
        return mean_loss(total, targets_BT, given_BT if shifted else given_BT[:, 1:], num_items)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Logits of hidden states."""
        return self.finish_logits(self.get_output_embeddings()(hidden_BTD))

    def _decode(
        self, ids_BT: Tensor, attention_mask: Tensor | None, cache: LatteCache, keep: int | Tensor
    ) -> Tensor | None:
        """Logits behind one token a row from the engine, the cache advanced; None where modules have to be called."""
        if ids_BT.dim() != 2 or ids_BT.shape[1] != 1 or not isinstance(keep, int) or keep < 0:
            return None
        if padding_mask(attention_mask, ids_BT) is not None:
            return None
        logits = self._engine.logits(self.body, self.get_output_embeddings(), ids_BT, cache)
        return None if logits is None else self.finish_logits(logits)

    def decode_each(self, ids_BT: Tensor, cache: LatteCache) -> Tensor | None:
        """Logits (B, T, words) behind each of a few tokens, the cache advanced: ``take_back`` takes back the last ones.

        None where the decode engine does not serve.
        """
        logits = self._engine.logits(self.body, self.get_output_embeddings(), ids_BT, cache)
        return None if logits is None else self.finish_logits(logits)

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        super().tie_weights(*args, **kwargs)
        tie_blocks(self)

    def quantize(self, weights: str) -> Self:
        """Turn the weights into blocks of ``"int8"`` or ``"int4"``, in place: a quarter or a sixth of the memory.

        Activations and small parameters stay floats; the model can be saved and loaded, but not trained.

        Raises:
            ValueError: another name, or weights that are quantised already.
        """
        return quantize_model(self, weights)

    def decode_refusal(self) -> str | None:
        """Why the decode engine does not serve this model, and modules read its tokens; None if it does."""
        return self._engine.refusal(self.body, self.get_output_embeddings())

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward makes its own

    def _prepare_cache_for_generation(  # type: ignore[override]
        self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any, **__: Any
    ) -> None:
        """A cache for ``generate``, unless the caller gave one.

        Raises:
            ValueError: a cache of another kind was asked for.
        """
        kind = generation_config.cache_implementation
        if kind not in (None, "dynamic"):
            raise ValueError(f"cache_implementation is {kind!r}, expected None: layers keep states of one size")
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            cache._is_user_defined = True  # as transformers marks it
        elif generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = cache = LatteCache()
            if generation_config.is_assistant:
                cache.activate_past_recording()

    def _prepare_position_ids_for_generation(self, inputs_tensor: Any, model_kwargs: Any) -> None:
        """None: places follow from the mask and the cache, which knows documents too."""


def _output(
    loss: Tensor | None, logits: Tensor | None, cache: LatteCache | None, read: Read | None = None
) -> CausalLMOutputWithPast:
    return CausalLMOutputWithPast(
        loss=cast("torch.FloatTensor | None", loss),
        logits=cast("torch.FloatTensor | None", logits),
        past_key_values=cache,
        hidden_states=cast(Any, None if read is None else read.stream),
        attentions=cast(Any, None if read is None else read.weights),
    )
