"""Products of a few rows with weight matrices, and the RG-LRU's step, on the CPU: functions without gradients."""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from latte.ops.native import library

MATRICES = 4  # at most, in one call
#: Rows of a batch up to which reading weights, not multiplying, is what takes the time.
FEW_ROWS = 4


def products(x: Tensor, weights: Sequence[Tensor], threads: int = 1) -> list[Tensor]:
    """x @ weight^T for up to four contiguous (N, K) matrices and x (B, K), in one pass. The caller has checked them.

    One thread reads nearly at the speed of memory; more are worth waking for many megabytes only.
    """
    outputs = [x.new_empty((x.shape[0], weight.shape[0])) for weight in weights]
    _call(x, weights, outputs, False, threads)
    return outputs


def gated_product(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x @ gate^T) * (x @ up^T) for contiguous (N, K) matrices and x (B, K). The caller has checked them."""
    y = x.new_empty((x.shape[0], gate.shape[0]))
    _call(x, (gate, up), (y, y), True, 1)
    return y


def _call(x: Tensor, weights: Sequence[Tensor], outputs: Sequence[Tensor], gated: bool, threads: int) -> None:
    x = library.rows(x)
    fields = [int(x.dtype == torch.float64), threads, *x.shape, len(weights), int(gated), 0, x.data_ptr(), x.stride(0)]
    for weight, y in zip(weights, outputs, strict=True):
        fields += (weight.data_ptr(), weight.shape[0], y.data_ptr())
    fields += (0,) * (3 * (MATRICES - len(weights)))
    library.kernel("products")(fields)


def rglru_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    decay: Tensor,
    power: float,
    h0: Tensor,
    count0: Tensor,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token of the RG-LRU with its gates' products: x (B, D), weight (2, H, W, W), bias (2, H, W), decay (D).

    mask and reset are (B). Returns y and h (B, D) and the count, all new. The caller has checked what it gives.
    """
    H, W = bias.shape[1:]
    x, h0, count0 = library.rows(x), h0.contiguous(), count0.contiguous()
    mask, reset = (None if flags is None else flags.contiguous() for flags in (mask, reset))
    y, h1, count1 = x.new_empty(h0.shape), torch.empty_like(h0), torch.empty_like(count0)
    tensors = (weight, bias, decay, h0, y, h1, count0, count1, mask, reset)
    library.kernel("rglru_step")(
        (
            *library.header(x),
            *(x.shape[0], H, W),
            struct.unpack("q", struct.pack("d", power))[0],
            x.data_ptr(),
            x.stride(0),
            *(library.pointer(tensor) for tensor in tensors),
        )
    )
    return y, h1, count1
