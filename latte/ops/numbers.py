"""Dtypes and exponentials that keep long recurrences exact."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: The log of an empty sum, and the logit of what is not seen. Finite: e to it is 0, and differences are numbers.
EMPTY = -1e30

#: The least log-decay that forms work with: e to it is 0 in every dtype, and sums and differences of it are numbers.
FORGET = -1e4


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype recurrences run in: the input's, but never below float32."""
    return tensor.dtype if tensor.dtype == torch.float64 else torch.float32


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of log-normalisers in states: float64, where the device has it.

    After a million tokens a new one moves a log-sum by 1e-6, less than float32 resolves at that size: a float32
    normaliser would stop counting.
    """
    return torch.float32 if device.type == "mps" else torch.float64


def exp_where(like: Tensor, condition: Tensor, exponent: Tensor) -> Tensor:
    """e to ``exponent`` (at most 0 wherever the condition holds), exactly 0 elsewhere, with no NaN in its gradient.

    In ``like``'s dtype: exponents may be wider, because they are differences of much larger numbers.
    """
    return bounded_exp(exponent.to(like.dtype)) * condition


def bounded_exp(exponent: Tensor, most: float = 0.0) -> Tensor:
    """e to exponents that are at most ``most``, or stand for nothing and are multiplied by 0 afterwards.

    Bounded on both sides: e to -1e30 takes a CPU thirty times as long as e to -80, and what stands for nothing must be
    finite. The upper bound leaves room for rounding, since a clamped exponent has no gradient.
    """
    return exponent.clamp(math.log(torch.finfo(exponent.dtype).tiny), most + 1.0).exp()


def log_add(a: Tensor, b: Tensor) -> Tensor:
    """log(e^a + e^b), with derivatives of every order: the second of torch.logaddexp is NaN where one sum is empty."""
    swapped = b > a
    more, less = torch.where(swapped, b, a), torch.where(swapped, a, b)
    return more + bounded_exp(less - more).log1p()
