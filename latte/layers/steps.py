"""Where the paces of state space models start: step sizes and rates of decay, softplus(step_bias) and e^{rate_log}."""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Step sizes are log-uniform between the two.
STEP_SIZES = (1e-3, 1e-1)


def initial_step_bias(like: Tensor) -> Tensor:
    """softplus^-1 of step sizes drawn log-uniformly."""
    step = torch.empty_like(like, requires_grad=False).uniform_(*map(math.log, STEP_SIZES)).exp()
    return step + torch.log(-torch.expm1(-step))


def initial_rate_log(like: Tensor, low: float, high: float) -> Tensor:
    """The logarithm of rates drawn uniformly."""
    return torch.empty_like(like, requires_grad=False).uniform_(low, high).log()
