"""What every causal language model here does around its layers: cache, loss and logits."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from latte.models.cache import LatteCache, ModelState
from latte.models.engine import Anatomy, new_engine
from latte.models.inputs import padding_mask
from latte.models.loss import next_token_loss
from latte.tokens import Tokens


class Read(NamedTuple):
    """Hidden states after the last norm, and if asked for the residual stream before and after each layer."""

    hidden_BTD: Tensor
    stream: tuple[Tensor, ...] | None = None


class CausalLM(PreTrainedModel, GenerationMixin):
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
        attention_mask: Tensor | None,
        reset: Tensor | None,
        cache: LatteCache | None,
        inputs_embeds: Tensor | None,
        output_hidden_states: bool | None,
    ) -> Read:
        """Read tokens behind those of the cache, and advance it."""
        raise NotImplementedError("an abstract method: every language model defines it")

    def finish_logits(self, logits: Tensor) -> Tensor:
        """What the model does to its logits in the end."""
        return logits

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

        ``attention_mask`` (B, T, or longer with a cache: its last T columns count) is 0 at padding, anywhere in the
        row; ``reset`` (B, T) is True at the first token of a document, anywhere in the row. Labels are shifted here;
        -100, padding and each document's first token are not predicted. With labels the logits are left out, since the
        loss never forms them whole: ``return_logits=True`` asks for them all the same. ``logits_to_keep`` keeps those
        of the last tokens only.

        Raises:
            ValueError: not exactly one of ids and embeddings, masks or labels that do not fit, or a cache of another
                model or batch.
        """
        if use_cache is None:
            training = self.training or labels is not None
            use_cache = past_key_values is not None or (bool(self.config.use_cache) and not training)
        cache = LatteCache() if past_key_values is None and use_cache else past_key_values
        plain = reset is None and inputs_embeds is None and labels is None and not output_hidden_states
        if plain and cache is not None and input_ids is not None and return_logits is not False:
            logits = self._decode(input_ids, attention_mask, cache, logits_to_keep)
            if logits is not None:
                return _output(None, logits, cache if use_cache else None, None)
        hidden_BTD, stream = self.read(input_ids, attention_mask, reset, cache, inputs_embeds, output_hidden_states)
        loss = logits = None
        if labels is not None:
            if labels.shape != hidden_BTD.shape[:2]:
                raise ValueError(f"labels has shape {tuple(labels.shape)}, expected {tuple(hidden_BTD.shape[:2])}")
            loss = next_token_loss(
                hidden_BTD,
                cast(Tensor, self.get_output_embeddings().weight),
                labels,
                tokens=Tokens.of(hidden_BTD, mask=padding_mask(attention_mask, hidden_BTD), reset=reset),
                num_items=num_items_in_batch,
                finish=None if type(self).finish_logits is CausalLM.finish_logits else self.finish_logits,
            )
        if return_logits or (return_logits is None and labels is None):
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.logits(hidden_BTD[:, kept])
        return _output(loss, logits, cache if use_cache else None, stream)

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

    def decode_each(self, ids_BT: Tensor, cache: LatteCache) -> tuple[Tensor, list[ModelState]] | None:
        """Logits (B, T, words) behind each of a few tokens and the state after each, the cache as it was.

        None where the decode engine does not serve.
        """
        read = self._engine.logits_of_each(self.body, self.get_output_embeddings(), ids_BT, cache)
        return None if read is None else (self.finish_logits(read[0]), read[1])

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # forward makes its own


def _output(
    loss: Tensor | None, logits: Tensor | None, cache: LatteCache | None, stream: tuple[Tensor, ...] | None
) -> CausalLMOutputWithPast:
    return CausalLMOutputWithPast(
        loss=cast("torch.FloatTensor | None", loss),
        logits=cast("torch.FloatTensor | None", logits),
        past_key_values=cache,
        hidden_states=cast(Any, stream),
    )
