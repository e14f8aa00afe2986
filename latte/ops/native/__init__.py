"""Kernels in C++ for the CPU, registered as torch operators (fake tensors, gradients, torch.compile).

Where the library was not built, `available()` is False and `describe()` says why; the functions then raise
RuntimeError. Importing this package tells `latte.ops` which ops have a kernel.
"""

from latte.ops.backends import NATIVE_OPS
from latte.ops.native.decay import decay_attention
from latte.ops.native.decode import Near, macchiato_step, rotary_speeds
from latte.ops.native.latte import EMPTY, causal_latte
from latte.ops.native.library import available, describe
from latte.ops.native.pointwise import rms_norm, rotate, swiglu
from latte.ops.native.product import FEW_ROWS, gated_product, products, rglru_step
from latte.ops.native.rglru import rglru
from latte.ops.native.scan import diagonal_scan
from latte.ops.native.token import (
    SPARE,
    LayerOptions,
    LayerState,
    LayerWeights,
    Sizes,
    StateLayout,
    TokenModel,
    layer_fields,
    token_step,
)
from latte.ops.native.window import window_attention

__all__ = [
    "EMPTY",
    "FEW_ROWS",
    "SPARE",
    "LayerOptions",
    "LayerState",
    "LayerWeights",
    "Near",
    "Sizes",
    "StateLayout",
    "TokenModel",
    "available",
    "causal_latte",
    "decay_attention",
    "describe",
    "diagonal_scan",
    "gated_product",
    "layer_fields",
    "macchiato_step",
    "products",
    "rglru",
    "rglru_step",
    "rms_norm",
    "rotary_speeds",
    "rotate",
    "swiglu",
    "token_step",
    "window_attention",
]

if available():
    NATIVE_OPS.update(("causal_latte", "decay_attention", "diagonal_scan", "rglru", "window_attention"))
    NATIVE_OPS.update(("macchiato_step", "products", "rms_norm", "rotate", "swiglu", "token_step"))
