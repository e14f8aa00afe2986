"""Products with weight matrices: the projections, which are most of the time of training."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latte.modes import values_hidden
from latte.ops import native
from latte.ops.registry import Draw, Example, operation

LARGE = 1 << 18  # numbers of a weight: below, calling the kernel for few rows takes as long as it saves
MANY = 1 << 22  # multiplications of a product: below, oneDNN takes longer to choose a kernel than it saves


@functools.cache
def prefers_onednn() -> bool:
    """Whether oneDNN is the faster library for float32: on processors of AMD with AVX-512.

    F.linear calls MKL, which runs its AVX2 code there; oneDNN, which torch has too, runs AVX-512 and takes half the
    time. On processors of Intel both run AVX-512.
    """
    try:
        amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return amd and "AVX512" in torch.backends.cpu.get_cpu_capability() and torch.backends.mkldnn.is_available()


class _Product(torch.autograd.Function):
    """a b^T by oneDNN. Its gradients are such products again, so it can be differentiated any number of times."""

    @staticmethod
    def forward(ctx: Any, a_MK: Tensor, b_NK: Tensor) -> Tensor:
        # For a part of a wider matrix oneDNN has a plain loop only, a hundred times slower.
        a_MK, b_NK = (x if x.is_contiguous() or x.T.is_contiguous() else x.contiguous() for x in (a_MK, b_NK))
        ctx.save_for_backward(a_MK, b_NK)
        # What torch.compile calls for a linear layer. It copies a if that is transposed.
        return torch.ops.mkldnn._linear_pointwise(a_MK, b_NK, None, "none", [], "")

    @staticmethod
    def backward(ctx: Any, slope_MN: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a_MK, b_NK = ctx.saved_tensors
        da_MK = _Product.apply(slope_MN, b_NK.T) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return da_MK, None
        if slope_MN.shape[1] <= a_MK.shape[1]:  # the smaller of the two is copied
            return da_MK, _Product.apply(slope_MN.T, a_MK.T)
        return da_MK, _Product.apply(a_MK.T, slope_MN.T).T.contiguous()


def _native(x: Tensor, weight_ED: Tensor) -> Tensor:
    whole = type(weight_ED) in (Tensor, nn.Parameter)  # not a subclass with a product of its own, as quantised ones
    plain = whole and weight_ED.dtype == x.dtype and not values_hidden(x) and not torch.is_autocast_enabled("cpu")
    few = x.dim() == 3 and x.shape[1] == 1 and x.shape[0] <= native.FEW_ROWS and weight_ED.numel() >= LARGE
    if plain and few and weight_ED.is_contiguous() and not torch.is_grad_enabled():
        return native.products(x[:, 0], [weight_ED], torch.get_num_threads())[0][:, None]
    many = x.dim() > 1 and x.numel() * weight_ED.shape[0] >= MANY and x.dtype == torch.float32
    if plain and many and prefers_onednn():
        return _Product.apply(x.flatten(0, -2), weight_ED).unflatten(0, x.shape[:-1])
    return F.linear(x, weight_ED)


def _example(draw: Draw) -> Example:
    return (draw.normal(draw.B, draw.T, 16), draw.normal(24, 16)), {}


@operation(reference=F.linear, native=_native, example=_example, autocast=True)
def project(x: Tensor, weight_ED: Tensor) -> tuple[Any, ...]:
    """x (..., D) times the weight's transpose.

    Without gradients, for one token of a few rows, at the speed of memory; large products on AMD by oneDNN.
    """
    return x, weight_ED
