"""Next-token cross-entropy that never holds the tokens x vocabulary matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latte.layers.hooks import watched
from latte.layers.linear import Linear, TokenLinear
from latte.modes import readable, transformed, values_hidden
from latte.tokens import Tokens

IGNORE = -100
#: Heads whose call is nothing but the product with their weight, if they have no bias and no hooks.
PRODUCTS = (Linear, TokenLinear, nn.Linear)
#: What a model does to its logits in the end.
Finish = Callable[[Tensor], Tensor]
# Logits held at a time, about: 2^22 floats are 16 MB.
LOGITS_AT_ONCE = 1 << 22


def linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, finish: Finish | None = None
) -> Tensor:
    """Sum of -log softmax(finish(hidden @ weight^T))[label] over tokens whose label is not -100.

    The gradients are made along with the loss, block by block, so that no logits outlive their block. Where numbers
    can't be looked at, or a function is transformed, all logits are made at once.
    """
    if values_hidden(hidden_ND) or transformed():
        return _from_logits(hidden_ND, weight_VD, labels_N, finish)
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, finish)


def _from_logits(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, finish: Callable[[Tensor], Tensor] | None
) -> Tensor:
    """The same by plain operations, with derivatives of every order."""
    raw = hidden_ND @ weight_VD.T
    raw = raw.to(torch.float64 if hidden_ND.dtype == torch.float64 else torch.float32)
    logits = raw if finish is None else finish(raw)
    return F.cross_entropy(logits, labels_N, ignore_index=IGNORE, reduction="sum")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        finish: Finish | None,
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
        ctx.save_for_backward(kept, hidden_grad, weight_grad, hidden_ND, weight_VD, labels_N)
        ctx.finish = finish
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        kept, hidden_grad, weight_grad, hidden_ND, weight_VD, labels_N = ctx.saved_tensors
        if torch.is_grad_enabled():  # asked for a graph of the gradient itself
            wanted = [x for x, wants in zip((hidden_ND, weight_VD), ctx.needs_input_grad, strict=False) if wants]
            total = _from_logits(hidden_ND, weight_VD, labels_N, ctx.finish)
            found = iter(torch.autograd.grad(total, wanted, gradient, create_graph=True))
            return (*(next(found) if wants else None for wants in ctx.needs_input_grad[:2]), None, None)
        if hidden_grad is not None:
            scaled = hidden_grad * gradient.to(hidden_grad.dtype)
            hidden_grad = scaled.new_zeros(hidden_ND.shape).index_copy_(0, kept, scaled)
        if weight_grad is not None:
            weight_grad = weight_grad * gradient.to(weight_grad.dtype)
        return hidden_grad, weight_grad, None, None


def pull_back(finish: Callable[[Tensor], Tensor], raw: Tensor, slope: Tensor) -> Tensor:
    """The gradient with respect to raw logits, given that with respect to finished ones."""
    with torch.enable_grad():
        leaf = raw.detach().requires_grad_()
        return torch.autograd.grad(finish(leaf), leaf, slope)[0]


def is_product(head: nn.Module) -> bool:
    """Whether calling ``head`` is the product with its weight and nothing else."""
    return type(head) in PRODUCTS and getattr(head, "bias", None) is None and not watched(head)


def summed_loss(head: nn.Module, hidden_ND: Tensor, labels_N: Tensor, finish: Finish | None = None) -> Tensor:
    """Sum of -log softmax(finish(head(hidden)))[label] over tokens whose label is not -100.

    A head that is nothing but a product with its weight is read block by block; any other (an adapter, a hook, a
    parametrisation, a bias) is called, on all tokens that have a label, or on all where labels can't be read.
    """
    if is_product(head):
        return linear_cross_entropy(hidden_ND, cast(Tensor, head.weight), labels_N, finish)
    if readable(labels_N):
        kept = (labels_N != IGNORE).nonzero()[:, 0]
        hidden_ND, labels_N = hidden_ND[kept], labels_N[kept]
    logits = head(hidden_ND)
    return logits_loss(logits if finish is None else finish(logits), labels_N)


def logits_loss(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """The same sum from logits."""
    wide = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.float()
    return F.cross_entropy(wide, labels_N, ignore_index=IGNORE, reduction="sum")


def next_token_targets(labels_BT: Tensor, tokens: Tokens) -> Tensor:
    """What each token but the last has to predict, within its document: (B, T - 1).

    Labels of -100, padding, and the first token of every document are not predicted: -100.
    """
    targets_BT = labels_BT[:, 1:]
    if tokens.mask is not None:
        targets_BT = targets_BT.masked_fill(~(tokens.mask[:, 1:] & tokens.mask[:, :-1]), IGNORE)
    if tokens.reset is not None:
        targets_BT = targets_BT.masked_fill(tokens.reset[:, 1:], IGNORE)
    return targets_BT


def mean_loss(total: Tensor, targets: Tensor, labels: Tensor, num_items: Tensor | int | None = None) -> Tensor:
    """A sum over the labelled targets as a mean over them, or as a part of a larger batch's mean.

    ``num_items`` is how many labels the larger batch has; of ``labels``, those here, it counts all that are not -100,
    also those at padding and at documents' first tokens, which are no targets. The mean of this batch then has the
    weight of its share of labels.
    """
    predicted = (targets != IGNORE).sum().clamp(min=1)
    if num_items is None:
        return total / predicted
    if isinstance(num_items, Tensor):
        num_items = num_items.to(total.device)
    return total * ((labels != IGNORE).sum() / predicted).to(total.dtype) / num_items


def next_token_loss(
    hidden_BTD: Tensor,
    head: nn.Module,
    labels_BT: Tensor,
    *,
    tokens: Tokens,
    num_items: Tensor | int | None = None,
    finish: Finish | None = None,
) -> Tensor:
    """Mean loss of predicting each label from the token before it, within its document.

    ``finish`` is applied to the logits; see :func:`mean_loss` for ``num_items``.
    """
    targets_BT = next_token_targets(labels_BT, tokens)
    total = summed_loss(head, hidden_BTD[:, :-1].flatten(0, 1), targets_BT.flatten(), finish)
    return mean_loss(total, targets_BT, labels_BT[:, 1:], num_items)


def classification_loss(
    logits_BN: Tensor, labels: Tensor, config: Any, num_items: Tensor | int | None = None
) -> Tensor:
    """The loss of ``config.problem_type``: cross-entropy, one sigmoid a label, or the squared error.

    Without a type, one label means regression, integer labels (B,) one class each, and others (B, num_labels) a set of
    classes each. ``num_items`` divides the sum over labels instead of their number here.

    Raises:
        ValueError: labels of a shape that does not fit the problem.
    """
    kind = config.problem_type
    if kind is None:
        one_class = not labels.is_floating_point() and labels.dtype != torch.bool
        several = "single_label_classification" if one_class else "multi_label_classification"
        kind = "regression" if logits_BN.shape[1] == 1 else several
    if kind == "single_label_classification":
        expected: tuple[int, ...] = (logits_BN.shape[0],)
        labels = labels.squeeze(-1) if labels.dim() == 2 and labels.shape[1] == 1 else labels
    else:
        expected = tuple(logits_BN.shape)
        labels = labels.reshape(expected) if labels.numel() == logits_BN.numel() else labels
    if tuple(labels.shape) != expected:
        raise ValueError(f"labels has shape {tuple(labels.shape)}, expected {expected} for {kind}")
    if kind == "single_label_classification":
        return mean_loss(logits_loss(logits_BN, labels), labels, labels, num_items)
    error = F.mse_loss if kind == "regression" else F.binary_cross_entropy_with_logits
    total = error(logits_BN, labels.to(logits_BN.dtype), reduction="sum")
    items = labels.numel() if num_items is None else num_items
    return total / (items.to(total.device) if isinstance(items, Tensor) else items)
