"""Heads of a bidirectional model that predict something of every token: its id where it was masked, or a label."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput, TokenClassifierOutput
from transformers.utils.generic import ModelOutput, can_return_tuple

from latte.layers.linear import TokenLinear
from latte.models.config import LatteConfig
from latte.models.decoder import LatteModel, LattePreTrainedModel
from latte.models.loss import logits_loss, mean_loss
from latte.models.stream import Layers


class _TokenHead(LattePreTrainedModel):
    """Hidden states of every token, a prediction from each, and its loss. Subclasses define :meth:`predict`."""

    output: type[ModelOutput]

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        if not config.bidirectional:
            raise ValueError("config.bidirectional is False, expected True: tokens are predicted from both sides")
        self.model = LatteModel(config)

    def predict(self, hidden_BTD: Tensor) -> Tensor:
        """Logits (B, T, ids or labels) of hidden states."""
        raise NotImplementedError("an abstract method: every head defines it")

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        reset: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: Layers = None,
        output_attentions: bool | None = None,
        **keywords: Any,
    ) -> Any:
        """Logits (B, T, ids or labels), and with ``labels`` (B, T) the cross-entropy where they are not -100.

        Raises:
            ValueError: as :meth:`LatteModel.forward`, or labels of another shape.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            reset=reset,
            inputs_embeds=inputs_embeds,
            position_ids=position_ids,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
            **keywords,
        )
        logits = self.predict(outputs.last_hidden_state)
        return self.output(
            loss=None if labels is None else self._loss(logits, labels, num_items_in_batch),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @staticmethod
    def _loss(logits: Tensor, labels: Tensor, num_items: Tensor | int | None) -> Tensor:
        """Mean cross-entropy over labels that are not -100; the labels say which tokens are predicted."""
        if labels.shape != logits.shape[:2]:
            raise ValueError(f"labels has shape {tuple(labels.shape)}, expected {tuple(logits.shape[:2])}")
        return mean_loss(logits_loss(logits.flatten(0, 1), labels.flatten()), labels, labels, num_items)


class LatteForMaskedLM(_TokenHead):
    """Predicts the ids of masked tokens from both sides."""

    output = MaskedLMOutput
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012  (the base class declares it so)

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        self.lm_head = TokenLinear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def predict(self, hidden_BTD: Tensor) -> Tensor:
        return self.lm_head(hidden_BTD)


class LatteForTokenClassification(_TokenHead):
    """Gives every token one of ``config.num_labels`` labels."""

    output = TokenClassifierOutput

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.dropout)
        self.score = nn.Linear(config.hidden_size, len(config.id2label or {}))
        self.post_init()

    def predict(self, hidden_BTD: Tensor) -> Tensor:
        return self.score(self.dropout(hidden_BTD))
