"""A product with a large weight for one token of a few rows: reading the weight is all that it costs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.modes import values_hidden
from latte.ops import native
from latte.ops.registry import Draw, Example, operation

LARGE = 1 << 18  # numbers: below, calling the kernel takes as long as it saves


def _native(x_BTD: Tensor, weight_ED: Tensor) -> Tensor:
    few = x_BTD.dim() == 3 and x_BTD.shape[1] == 1 and x_BTD.shape[0] <= native.FEW_ROWS
    if not few or weight_ED.numel() < LARGE or not weight_ED.is_contiguous() or weight_ED.dtype != x_BTD.dtype:
        return F.linear(x_BTD, weight_ED)
    if values_hidden(x_BTD) or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return F.linear(x_BTD, weight_ED)
    return native.products(x_BTD[:, 0], [weight_ED], torch.get_num_threads())[0][:, None]


def _example(draw: Draw) -> Example:
    return (draw.normal(draw.B, draw.T, 16), draw.normal(24, 16)), {}


@operation(reference=F.linear, native=_native, example=_example, autocast=True)
def project(x_BTD: Tensor, weight_ED: Tensor) -> tuple[Any, ...]:
    """x times the weight's transpose; without gradients, for one token of a few rows, at the speed of memory."""
    return x_BTD, weight_ED
