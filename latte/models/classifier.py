"""The encoder-classifier: the mean of a document's hidden states decides; or those of two documents, compared."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from latte.models.config import LatteConfig
from latte.models.decoder import LatteModel, LattePreTrainedModel
from latte.models.inputs import tokens_of


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

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        pair_input_ids: Tensor | None = None,
        pair_attention_mask: Tensor | None = None,
        **_: Any,
    ) -> SequenceClassifierOutput:
        """Logits (B, num_labels), and with ``labels`` (B,) the cross-entropy.

        Raises:
            ValueError: one document given to two towers, two to one, or masks that do not fit.
        """
        if (pair_input_ids is not None) != self.config.two_towers:
            have = "no pair_input_ids" if pair_input_ids is None else "pair_input_ids"
            raise ValueError(f"{have} were given, but config.two_towers is {self.config.two_towers}")
        features = self._pool(input_ids, attention_mask)
        if pair_input_ids is not None:
            other = self._pool(pair_input_ids, pair_attention_mask)
            features = torch.cat([features, other, features * other, features - other], dim=-1)
        logits = self.score(F.gelu(self.head(features)))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SequenceClassifierOutput(loss=cast("torch.FloatTensor | None", loss), logits=logits)

    def _pool(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The mean over real tokens."""
        hidden_BTD = self.model(input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
        tokens = tokens_of(hidden_BTD, attention_mask, None, None)
        return tokens.zero_padding(hidden_BTD).sum(dim=1) / tokens.read_B[:, None].clamp(min=1)
