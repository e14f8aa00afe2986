"""Next-token cross-entropy that never holds the tokens x vocabulary matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.tokens import Tokens

IGNORE = -100
# Logits held at a time, about: 2^22 floats are 16 MB.
LOGITS_AT_ONCE = 1 << 22


def linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, finish: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Sum of -log softmax(finish(hidden @ weight^T))[label] over tokens whose label is not -100.

    The gradients are made along with the loss, block by block, so that no logits outlive their block.
    """
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, finish)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        finish: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        # Tokens without a label cost nothing from here on.
        kept = (labels_N != IGNORE).nonzero()[:, 0]
        hidden, labels = hidden_ND[kept], labels_N[kept]
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        weight_grad = torch.zeros_like(weight_VD) if wants_weight else None
        total = hidden.new_zeros((), dtype=torch.float64 if hidden.dtype == torch.float64 else torch.float32)
        size = max(1, LOGITS_AT_ONCE // weight_VD.shape[0])
        for start in range(0, labels.shape[0], size):
            block = slice(start, start + size)
            raw = (hidden[block] @ weight_VD.T).to(total.dtype)
            slope = (raw if finish is None else finish(raw)).log_softmax(dim=-1)
            total += F.nll_loss(slope, labels[block], reduction="sum")
            if not (wants_hidden or wants_weight):
                continue
            # d loss / d logits = softmax - one-hot
            slope.exp_()[torch.arange(slope.shape[0], device=slope.device), labels[block]] -= 1
            slope = (slope if finish is None else pull_back(finish, raw, slope)).to(hidden.dtype)
            if hidden_grad is not None:
                torch.mm(slope, weight_VD, out=hidden_grad[block])
            if weight_grad is not None:
                weight_grad.addmm_(slope.T, hidden[block])
        ctx.save_for_backward(kept, hidden_grad, weight_grad)
        ctx.shape = hidden_ND.shape
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        kept, hidden_grad, weight_grad = ctx.saved_tensors
        if hidden_grad is not None:
            scaled = hidden_grad * gradient.to(hidden_grad.dtype)
            hidden_grad = scaled.new_zeros(ctx.shape).index_copy_(0, kept, scaled)
        if weight_grad is not None:
            weight_grad = weight_grad * gradient.to(weight_grad.dtype)
        return hidden_grad, weight_grad, None, None


def pull_back(finish: Callable[[Tensor], Tensor], raw: Tensor, slope: Tensor) -> Tensor:
    """The gradient with respect to raw logits, given that with respect to finished ones."""
    with torch.enable_grad():
        leaf = raw.detach().requires_grad_()
        return torch.autograd.grad(finish(leaf), leaf, slope)[0]


def next_token_loss(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    *,
    tokens: Tokens,
    num_items: Tensor | int | None = None,
    finish: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Mean loss of predicting each label from the token before it, within its document.

    Labels of -100, padding, and the first token of every document are not predicted. ``num_items`` divides the sum
    instead of the number of predicted tokens: for batches that are parts of a larger one. ``finish`` is applied to the
    logits.
    """
    targets_BT = labels_BT[:, 1:]
    if tokens.mask is not None:
        targets_BT = targets_BT.masked_fill(~(tokens.mask[:, 1:] & tokens.mask[:, :-1]), IGNORE)
    if tokens.reset is not None:
        targets_BT = targets_BT.masked_fill(tokens.reset[:, 1:], IGNORE)
    targets_N = targets_BT.flatten()
    total = linear_cross_entropy(hidden_BTD[:, :-1].flatten(0, 1), weight_VD, targets_N, finish)
    if num_items is None:
        num_items = (targets_N != IGNORE).sum().clamp(min=1)
    elif isinstance(num_items, Tensor):
        num_items = num_items.to(total.device)
    return total / num_items
