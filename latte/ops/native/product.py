"""Products of a few rows with weight matrices on the CPU: a function without gradients."""

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
    x = library.rows(x)
    fields = [int(x.dtype == torch.float64), threads, *x.shape, len(weights), 0, 0, 0, x.data_ptr(), x.stride(0)]
    for weight, y in zip(weights, outputs, strict=True):
        fields += (weight.data_ptr(), 0, weight.shape[0], 0, y.data_ptr())
    fields += (0,) * (5 * (MATRICES - len(weights)))
    library.kernel("products")(fields)
    return outputs
