"""A classifier of documents on an extended model: the last token's hidden states decide, as in transformers' own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from latte.extend.config import LatteExtendedConfig
from latte.extend.model import LatteExtendedForCausalLM
from latte.models.attention_choice import NoAttentionChoice
from latte.models.classifier import refuse_several_documents, verdict
from latte.models.inputs import given_tokens, padding_mask, resets_of
from latte.models.stream import Layers


class LatteExtendedForSequenceClassification(NoAttentionChoice):
    """Classifies documents by what an extended model knows after their last token.

    Loaded from the folder of an extended language model it has new weights in ``score`` alone. The language model's
    head stays in the folder that it saves, and is not trained unless it is the embedding.
    """

    config_class = LatteExtendedConfig
    base_model_prefix = "extended"
    supports_gradient_checkpointing = True
    _no_split_modules = ["ExtendedAttention"]  # noqa: RUF012  (the base class declares it so)

    def __init__(self, config: LatteExtendedConfig) -> None:
        super().__init__(config)
        self.extended = LatteExtendedForCausalLM(config)
        self.score = nn.Linear(config.hidden_size, len(config.id2label or {}), bias=False)
        if not config.tie_word_embeddings:
            self.extended.get_output_embeddings().requires_grad_(False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.extended.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.extended.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        position_ids: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        output_hidden_states: Layers = None,
        output_attentions: bool | None = None,
        **keywords: Any,
    ) -> SequenceClassifierOutput:
        """Logits (B, num_labels), and with ``labels`` the loss of ``config.problem_type``.

        The last token of a row is the last that ``attention_mask`` keeps; without a mask, the last that is not
        ``config.pad_token_id``.

        Raises:
            ValueError: not exactly one of ids and embeddings, several documents in a row, an unknown keyword, or masks
                or labels that do not fit.
        """
        given_BT, config = given_tokens(input_ids, inputs_embeds), self.config
        refuse_several_documents(resets_of(self, given_BT, attention_mask, None, position_ids, None, keywords))
        wants_stream = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        wants_weights = config.output_attentions if output_attentions is None else output_attentions
        read = self.extended.read(
            input_ids,
            attention_mask,
            inputs_embeds=inputs_embeds,
            output_hidden_states=wants_stream,
            output_attentions=wants_weights,
        )
        real_BT = padding_mask(attention_mask, given_BT)
        if attention_mask is None and input_ids is not None and config.pad_token_id is not None:
            real_BT = input_ids != config.pad_token_id
        logits = self.score(last_token(read.hidden_BTD, real_BT))
        return verdict(config, logits, labels, num_items_in_batch, read.stream, read.weights)


def last_token(hidden_BTD: Tensor, real_BT: Tensor | None) -> Tensor:
    """Hidden states (B, D) of each row's last real token."""
    if real_BT is None:
        return hidden_BTD[:, -1]
    place_T = torch.arange(hidden_BTD.shape[1], device=hidden_BTD.device)
    last_B = (place_T * real_BT.to(hidden_BTD.device)).argmax(dim=1)
    return hidden_BTD[torch.arange(len(last_B), device=hidden_BTD.device), last_B]


AutoModelForSequenceClassification.register(LatteExtendedConfig, LatteExtendedForSequenceClassification, exist_ok=True)
