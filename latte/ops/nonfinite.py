"""NaN and infinite numbers in the past of a token, kept from the tokens before them.

Parallel forms multiply what a token does not see by 0, and 0 times NaN is NaN. So the inputs of tokens with such
numbers are replaced by zeros, and outputs and states that depend on one of these tokens are set to NaN afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from latte.modes import readable
from latte.tokens import Tokens


def nonfinite_tokens(*tensors_BT: Tensor) -> Tensor:
    """Tokens at which one of the tensors (B, T, ...) holds NaN or an infinite number: (B, T)."""
    low = (~(x.detach().flatten(2).amin(dim=2) > -float("inf")) for x in tensors_BT)
    return functools.reduce(torch.logical_or, low, nonfinite_logits(*tensors_BT))


def nonfinite_logits(*tensors_BT: Tensor) -> Tensor:
    """The same for logits, where minus infinity is a number like others: the log of 0."""
    high = (~(x.detach().flatten(2).amax(dim=2) < float("inf")) for x in tensors_BT)
    return functools.reduce(torch.logical_or, high)


def none_of(flags: Tensor) -> bool:
    """Whether all flags are known to be False. Looking waits for a GPU, so only a CPU's are looked at."""
    return flags.device.type == "cpu" and readable(flags) and not bool(flags.any())


def without(flags: Tensor, x: Tensor) -> Tensor:
    """Zeros where ``flags``, over the first axes of x, are set."""
    return torch.where(_aligned(flags, x), 0.0, x)


def spoiled(flags: Tensor, y: Tensor) -> Tensor:
    """NaN where ``flags``, over the first axes of y, are set. Added, so that gradients are NaN there too."""
    return y + _aligned(torch.where(flags, float("nan"), 0.0).to(y.dtype), y)


def _aligned(flags: Tensor, x: Tensor) -> Tensor:
    return flags.reshape(*flags.shape, *[1] * (x.dim() - flags.dim()))


def seen_since(flags_BT: Tensor, tokens: Tokens) -> Tensor:
    """Tokens at or behind a flagged token of their document: (B, T)."""
    segment_BT = tokens.segment_BT
    return torch.where(flags_BT, segment_BT, -1).cummax(dim=1).values == segment_BT


def contained(numbers: Sequence[int], logits: Sequence[int] = ()) -> Callable[..., Callable[..., Any]]:
    """Decorator for a form of a recurrence that ends in ``state, tokens`` and returns outputs and a state.

    ``numbers`` and ``logits`` are the places of the arguments (B, T, ...) that later tokens see.
    """

    def decorate(form: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(form)
        def call(*args: Any) -> Any:
            inputs, tokens = list(args), args[-1]
            flags_BT = nonfinite_tokens(*(args[i] for i in numbers if args[i] is not None))
            gates = [args[i] for i in logits if args[i] is not None]
            if gates:
                flags_BT = flags_BT | nonfinite_logits(*gates)
            if none_of(flags_BT):
                return form(*args)
            flags_BT = flags_BT & tokens.real_BT
            for i in (*numbers, *logits):
                inputs[i] = None if args[i] is None else without(flags_BT, args[i])
            y_BT, after = form(*inputs)
            behind_BT = seen_since(flags_BT, tokens)
            last_B = behind_BT[:, -1]
            return (
                tokens.zero_padding(spoiled(behind_BT, y_BT)),
                after.map(lambda t: spoiled(last_B, t) if t.is_floating_point() else t),
            )

        return call

    return decorate
