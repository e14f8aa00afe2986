"""What an extended model learns from: the pretrained model that it holds, layer by layer and by its predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.extend.model import LatteExtendedForCausalLM
from latte.models.loss import IGNORE, LOGITS_AT_ONCE, pull_back


def transfer_losses(model: LatteExtendedForCausalLM, input_ids: Tensor, reset: Tensor | None) -> Tensor:
    """Relative squared error of every layer's output on the pretrained layer's own input: (layers,)."""
    _, reading = model.read_as("transfer", input_ids, reset=reset)
    return torch.stack([reading.losses[layer] for layer in sorted(reading.losses)])


def teacher_states(model: LatteExtendedForCausalLM, input_ids: Tensor, reset: Tensor | None) -> Tensor:
    """The pretrained model's hidden states: the same model with its own full attention."""
    with torch.no_grad():
        return model.read_as("original", input_ids, reset=reset)[0]


def distillation_loss(
    model: LatteExtendedForCausalLM,
    input_ids: Tensor,
    labels: Tensor,
    reset: Tensor | None,
    *,
    known: Tensor | None,
    divergence: float = 1.0,
    next_token: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss a token, and its two parts: KL from the pretrained model's predictions, and next-token cross-entropy.

    ``known`` are the pretrained model's hidden states (:func:`teacher_states`); without them there is no divergence.
    """
    hidden_BTD = model.read(input_ids, reset=reset).hidden_BTD
    targets_BT = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
    return _Distillation.apply(
        hidden_BTD.flatten(0, 1),
        None if known is None else known.flatten(0, 1),
        model.output_weight,
        targets_BT.flatten(),
        model.finish_logits,
        divergence,
        next_token,
    )


class _Distillation(torch.autograd.Function):
    """Both losses in blocks of tokens, the gradient made along with them, so that no logits outlive their block."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        known_ND: Tensor | None,
        weight_VD: Tensor,
        targets_N: Tensor,
        finish: Callable[[Tensor], Tensor],
        divergence: float,
        next_token: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kept = (targets_N != IGNORE).nonzero()[:, 0]
        gradient = torch.zeros_like(hidden_ND)
        totals = hidden_ND.new_zeros(2)
        size = max(1, LOGITS_AT_ONCE // weight_VD.shape[0])
        for rows in kept.split(size):
            raw = hidden_ND[rows] @ weight_VD.T
            log_p = finish(raw).log_softmax(dim=-1)
            targets = targets_N[rows]
            totals[1] += F.nll_loss(log_p, targets, reduction="sum")
            p = log_p.exp()
            # d / d logits: p - q for the divergence from q, p - one-hot for the cross-entropy
            slope = (divergence * (known_ND is not None) + next_token) * p
            if known_ND is not None:
                log_q = finish(known_ND[rows] @ weight_VD.T).log_softmax(dim=-1)
                q = log_q.exp()
                totals[0] += torch.sum(q * (log_q - log_p))
                slope -= divergence * q
            slope[torch.arange(len(rows), device=rows.device), targets] -= next_token
            gradient[rows] = pull_back(finish, raw, slope) @ weight_VD
        totals = totals / max(1, len(kept))
        ctx.save_for_backward(gradient / max(1, len(kept)))
        ctx.mark_non_differentiable(totals)
        loss = divergence * totals[0] + next_token * totals[1]
        parts = totals.clone()
        return loss, parts[0], parts[1]

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (slope * gradient, *(None,) * 6)
