"""The encoder-classifier: the mean of a document's hidden states decides; or those of two documents, compared."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from latte.models.config import LatteConfig
from latte.models.decoder import LatteModel, LattePreTrainedModel
from latte.models.inputs import given_tokens, resets_of, tokens_of
from latte.models.loss import classification_loss
from latte.models.stream import Layers


def mean_of_tokens(hidden_BTD: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The mean (B, D) over real tokens."""
    tokens = tokens_of(hidden_BTD, attention_mask, None, None)
    return tokens.zero_padding(hidden_BTD).sum(dim=1) / tokens.read_B[:, None].clamp(min=1)


def refuse_several_documents(reset: Tensor | None) -> None:
    """Raise ValueError where documents begin inside rows: each row gets one verdict."""
    if reset is not None and bool(reset[:, 1:].any()):
        raise ValueError("rows hold several documents, expected one document a row: each row gets one verdict")


def verdict(
    config: Any,
    logits: Tensor,
    labels: Tensor | None,
    num_items: Tensor | int | None,
    hidden_states: Any = None,
    attentions: Any = None,
) -> SequenceClassifierOutput:
    """Logits (B, num_labels) as a classifier returns them, with ``labels`` beside the loss of the problem's type."""
    loss = None if labels is None else classification_loss(logits, labels, config, num_items)
    return SequenceClassifierOutput(
        loss=cast("torch.FloatTensor | None", loss),
        logits=cast("torch.FloatTensor", logits),
        hidden_states=hidden_states,
        attentions=attentions,
    )


class LatteForSequenceClassification(LattePreTrainedModel):
    """Classifies documents, best with ``config.bidirectional``; with ``config.two_towers``, pairs of them.

    Two towers share their weights; the head sees both means a and b, their product and their difference.
    """

    def __init__(self, config: LatteConfig) -> None:
        super().__init__(config)
        self.model = LatteModel(config)
        features = config.hidden_size * (4 if config.two_towers else 1)
        self.head = nn.Linear(features, config.hidden_size)
        self.score = nn.Linear(config.hidden_size, len(config.id2label or {}))
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        pair_input_ids: Tensor | None = None,
        pair_attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        pair_inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: Layers = None,
        output_attentions: bool | None = None,
        **keywords: Any,
    ) -> SequenceClassifierOutput:
        """Logits (B, num_labels), and with ``labels`` the loss of ``config.problem_type``.

        Hidden states and attention weights, where asked for, are those of the first document.

        Raises:
            ValueError: one document given to two towers, two to one, several documents in a row, an unknown keyword, or
                masks or labels that do not fit.
        """
        given_BT = given_tokens(input_ids, inputs_embeds)
        refuse_several_documents(resets_of(self, given_BT, attention_mask, None, position_ids, None, keywords))
        paired = pair_input_ids is not None or pair_inputs_embeds is not None
        if paired != self.config.two_towers:
            name = "pair_input_ids" if pair_inputs_embeds is None else "pair_inputs_embeds"
            have = name if paired else "no pair_input_ids"
            raise ValueError(f"{have} were given, but config.two_towers is {self.config.two_towers}")
        outputs = self._read(input_ids, inputs_embeds, attention_mask, output_hidden_states, output_attentions)
        features = mean_of_tokens(outputs.last_hidden_state, attention_mask)
        if paired:
            other = self._read(pair_input_ids, pair_inputs_embeds, pair_attention_mask, False, False)
            other_BD = mean_of_tokens(other.last_hidden_state, pair_attention_mask)
            features = torch.cat([features, other_BD, features * other_BD, features - other_BD], dim=-1)
        logits = self.score(F.gelu(self.head(features)))
        seen = outputs.hidden_states, outputs.attentions
        return verdict(self.config, logits, labels, num_items_in_batch, *seen)

    def _read(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        output_hidden_states: Layers,
        output_attentions: bool | None,
    ) -> Any:
        return self.model(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            use_cache=False,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
