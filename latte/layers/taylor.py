"""Features whose product is the exponential of a scaled product, to second order: those of Based and of QT."""

from __future__ import annotations

import torch
from torch import Tensor


def second_order(x: Tensor) -> Tensor:
    """phi(x) = [1, z, (z_i z_j)_{i<=j}] with z = x / K^{1/4}: phi(q) . phi(k) = 1 + r + r^2/2, r = q . k / sqrt(K)."""
    width = x.shape[-1]
    z = x * width**-0.25
    rows, columns = torch.triu_indices(width, width, device=z.device)
    # Each pair i < j stands once for two: sqrt(2 * 1/2) = 1; squares have sqrt(1/2).
    pairs = z[..., rows] * z[..., columns] * torch.where(rows == columns, z.new_tensor(0.5).sqrt(), 1.0)
    return torch.cat([torch.ones_like(z[..., :1]), z, pairs], dim=-1)


def second_order_width(width: int) -> int:
    """How many features there are of so many channels."""
    return 1 + width + width * (width + 1) // 2
