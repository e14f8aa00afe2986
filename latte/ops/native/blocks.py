"""Weights in blocks of few bits as floats, on the CPU."""

import torch
from torch import Tensor

from latte.ops.native import library

#: Formats by the number that kernels know them by, 0 being floats.
FORMATS = {"Q8_0": 1, "Q4_0": 2, "Q4_1": 3, "Q4_K": 4, "Q6_K": 5}


def unpack_blocks(blocks: Tensor, kind: str, columns: int) -> Tensor:
    """(rows, bytes) uint8 as (rows, columns) float32. The caller has checked them."""
    y = torch.empty(blocks.shape[0], columns, device="cpu")
    fields = (torch.get_num_threads(), FORMATS[kind], blocks.shape[0], columns, blocks.data_ptr(), y.data_ptr())
    library.kernel("unpack_blocks")(fields)
    return y


def block_product(x: Tensor, blocks: Tensor, kind: str, bias: Tensor | None) -> Tensor:
    """x (M, K) float32 times a matrix (N, K) in blocks, transposed, plus a bias. The caller has checked them."""
    x = x.contiguous()
    y = x.new_empty(x.shape[0], blocks.shape[0])
    sizes = (torch.get_num_threads(), FORMATS[kind], *x.shape, blocks.shape[0])
    library.kernel("block_product")((*sizes, x.data_ptr(), blocks.data_ptr(), library.pointer(bias), y.data_ptr()))
    return y
