"""The equations, token by token, in float64: what every kernel is compared with."""

import pytest
import torch
from torch import Tensor

from latte.ops import native

needs_library = pytest.mark.skipif(not native.available(), reason=native.describe())
EMPTY = -1e30


def spread(x: Tensor) -> Tensor:
    """The same values behind other strides: heads outermost, rows apart."""
    y = x.new_full((x.shape[0], x.shape[2], x.shape[1], x.shape[3] + 3), float("nan"))
    y[..., : x.shape[3]] = x.transpose(1, 2)
    return y[..., : x.shape[3]].transpose(1, 2)


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest value."""
    if a.numel() == 0:
        return 0.0
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-3))


def latte(
    p: Tensor, k: Tensor, v: Tensor, a: Tensor, S: Tensor, mask: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal Latte."""
    B, T = p.shape[:2]
    rows = []
    for b in range(B):
        a_b, S_b, ys = a[b], S[b], []
        for t in range(T):
            if reset is not None and reset[b, t]:
                a_b, S_b = torch.full_like(a_b, EMPTY), torch.zeros_like(S_b)
            if mask is not None and not mask[b, t]:
                ys.append(torch.zeros_like(v[b, t]))
                continue
            new = torch.logaddexp(a_b, k[b, t])
            S_b = (a_b - new).exp()[..., None] * S_b + (k[b, t] - new).exp()[..., None] * v[b, t][:, None]
            a_b = new
            ys.append(torch.einsum("hm,hmv->hv", p[b, t], S_b))
        rows.append((torch.stack(ys), a_b, S_b))
    return tuple(torch.stack(x) for x in zip(*rows, strict=True))  # type: ignore[return-value]
