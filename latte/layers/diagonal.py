"""Diagonal state-space models of every channel, as mixers share them: discretised."""

from __future__ import annotations

import torch
from torch import Tensor

from latte.layers.marks import Mark
from latte.ops.complex_scan import complex_product, unit_circle
from latte.ops.numbers import wide_dtype

#: Bounds the rate of decay away from 0.
SLOWEST = 1e-4
#: The state-space parameters learn more slowly, without weight decay.
SLOW = Mark(decay=False, float32=True, learning_rate=0.25)


def zero_order_hold(
    log_rate_DN: Tensor, frequency_DN: Tensor, log_step_D: Tensor, out_weight_DNZ: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """log |a| and arg a (D, N), in float64; and C (a - 1) / A (D, N, Z), which reads the state.

    A = -1e-4 - e^{log_rate} + i frequency and a = e^{A Delta}, Delta = e^{log_step}: one of each pair of conjugates.
    """
    wide = wide_dtype(log_rate_DN.device)
    rate, frequency = SLOWEST + log_rate_DN.to(wide).clamp(max=40.0).exp(), frequency_DN.to(wide)
    step_D1 = log_step_D.to(wide).clamp(max=10.0).exp()[:, None]
    log_r, theta = -rate * step_D1, frequency * step_D1
    change_Z = log_r.exp()[..., None] * unit_circle(theta) - theta.new_tensor([1.0, 0.0])
    inverse_Z = torch.stack([-rate, -frequency], dim=-1) / (rate**2 + frequency**2)[..., None]
    return log_r, theta, complex_product(complex_product(change_Z, inverse_Z), out_weight_DNZ.to(wide))
