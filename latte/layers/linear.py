"""Projections into heads and out of them, and norms."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latte.layers.hooks import watched
from latte.ops.pointwise import rms_norm
from latte.ops.product import project


class Linear(nn.Linear):
    """A projection without bias; ``residual`` marks the last one before the residual stream, which starts smaller.

    Under autocast its product is narrow but its output is not: what follows in a mixer adds up over tokens.
    """

    def __init__(self, inputs: int, outputs: int, residual: bool = False) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight).to(x.dtype)


class LowRank(nn.Module):
    """W_2 f(W_1 x), with f the identity unless given."""

    def __init__(
        self, inputs: int, rank: int, outputs: int, activation: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        if rank < 1:
            raise ValueError(f"rank is {rank}, expected at least 1")
        self.down, self.up = Linear(inputs, rank), Linear(rank, outputs)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        return self.up(y if self.activation is None else self.activation(y))


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), times a learned scale; computed in float32 or better."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class HeadNorm(nn.Module):
    """:func:`head_norm` as a module. The contract takes it out where it compares outputs in float32."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, y_BTHV: Tensor) -> Tensor:
        return head_norm(y_BTHV, self.eps)


class TokenLinear(nn.Linear):
    """A projection, with a bias or without, by the fastest product there is: see :func:`latte.ops.product.project`."""

    def forward(self, x: Tensor) -> Tensor:
        y = project(x, self.weight)
        return y if self.bias is None else y + self.bias

    @classmethod
    def take_over(cls, module: nn.Module) -> None:
        """Make plain projections inside a module such ones: the same weights under the same names."""
        for part in module.modules():
            if type(part) is nn.Linear:
                part.__class__ = cls


def projected(linear: nn.Module, x: Tensor) -> Tensor:
    """linear(x), by the fastest product there is where it is a plain layer that nothing watches.

    For layers that tools replace by their exact class, as torch's dynamic quantisation does: they stay ``nn.Linear``.
    """
    if type(linear) is not nn.Linear or torch.compiler.is_compiling() or watched(linear):
        return linear(x)
    y = project(x, linear.weight)
    return y if linear.bias is None else y + linear.bias


def split_heads(x_BTD: Tensor, heads: int) -> Tensor:
    return x_BTD.unflatten(-1, (heads, -1))


def repeat_heads(x_BTGV: Tensor, heads: int) -> Tensor:
    """Each key/value head once for every query head of its group."""
    groups = x_BTGV.shape[2]
    return x_BTGV if groups == heads else x_BTGV.repeat_interleave(heads // groups, dim=2)


def head_norm(y_BTHV: Tensor, eps: float) -> Tensor:
    """RMS norm of each head by itself, without parameters."""
    return F.rms_norm(y_BTHV, y_BTHV.shape[-1:], None, eps)


def unit_length(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(|x|^2 + eps) along the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
