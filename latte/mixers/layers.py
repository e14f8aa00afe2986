"""Small layers that mixers share."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latte.ops import native
from latte.ops.backends import choose_backend
from latte.ops.pointwise import rms_norm


class Linear(nn.Linear):
    """A projection without bias; ``residual`` marks the last one before the residual stream, which starts smaller.

    Under autocast its product is narrow but its output is not: what follows in a mixer adds up over tokens.
    """

    def __init__(self, inputs: int, outputs: int, residual: bool = False) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


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


def nothing_but_forwards(modules: Iterable[nn.Module]) -> bool:
    """Whether calling these does what their classes say, and nobody watches: no hooks, nothing put in their place.

    One loop over them all: decoding asks it of a hundred modules for every token.
    """
    for module in modules:
        own = module.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own or "_compiled_call_impl" in own:
            return False
    return True


def nothing_but_forward(module: nn.Module) -> bool:
    """:func:`nothing_but_forwards` of one."""
    return nothing_but_forwards((module,))


def project_token(x_B1D: Tensor, layer: nn.Linear) -> Tensor:
    """``layer(x)`` for a large layer; for one token of a few rows without gradients, at the speed of memory."""
    if type(layer) is not nn.Linear or layer.bias is not None or not nothing_but_forward(layer):
        return layer(x_B1D)
    y_B1D = _token_product(x_B1D, layer.weight)
    return layer(x_B1D) if y_B1D is None else y_B1D


class PretrainedLinear(nn.Linear):
    """A projection of a pretrained model; for one token of a few rows without gradients, at the speed of memory."""

    LARGE = 1 << 18  # numbers: below, calling the kernel takes as long as it saves

    def forward(self, x: Tensor) -> Tensor:
        y = _token_product(x, self.weight) if x.dim() == 3 and self.weight.numel() >= self.LARGE else None
        if y is None:
            return super().forward(x)
        return y if self.bias is None else y + self.bias

    @classmethod
    def take_over(cls, module: nn.Module) -> None:
        """Make plain projections inside a module such ones: the same weights under the same names."""
        for part in module.modules():
            if type(part) is nn.Linear:
                part.__class__ = cls


def _token_product(x_B1D: Tensor, weight: Tensor) -> Tensor | None:
    """x times the weight's transpose by the kernel for few rows; None where it does not serve."""
    if x_B1D.shape[1] != 1 or x_B1D.shape[0] > native.FEW_ROWS or not weight.is_contiguous():
        return None
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return None
    if weight.dtype != x_B1D.dtype or choose_backend("products", None, x_B1D) != "native":
        return None
    return native.products(x_B1D[:, 0], [weight], torch.get_num_threads())[0][:, None]


def project_together(x_BD: Tensor, *projections: Linear) -> list[Tensor]:
    """Several projections of the same few rows, without gradients: one pass over all their weights where it can be."""
    plain = all(type(layer) is Linear and nothing_but_forward(layer) for layer in projections)
    if plain and x_BD.shape[0] <= native.FEW_ROWS and choose_backend("products", None, x_BD) == "native":
        return native.products(x_BD, [layer.weight for layer in projections])
    return [layer(x_BD) for layer in projections]


def split_heads(x_BTD: Tensor, heads: int) -> Tensor:
    return x_BTD.unflatten(-1, (heads, -1))


def repeat_heads(x_BTGV: Tensor, heads: int) -> Tensor:
    """Each key/value head once for every query head of its group."""
    groups = x_BTGV.shape[2]
    return x_BTGV if groups == heads else x_BTGV.repeat_interleave(heads // groups, dim=2)


def head_norm(y_BTHV: Tensor, eps: float) -> Tensor:
    """RMS norm of each head by itself, without parameters."""
    return F.rms_norm(y_BTHV, y_BTHV.shape[-1:], None, eps)
