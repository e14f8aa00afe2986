"""Kernels in C++ for the CPU, registered as torch operators (fake tensors, gradients, torch.compile).

Where the library was not built, `available()` is False and `describe()` says why; the functions then raise
RuntimeError. Ops name their kernel where they are registered (latte/ops/registry.py).
"""

from latte.ops.native.decay import decay_attention
from latte.ops.native.decode import WindowStep, macchiato_step, rotary_speeds
from latte.ops.native.delta import delta_attention
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
    "Sizes",
    "StateLayout",
    "TokenModel",
    "WindowStep",
    "available",
    "causal_latte",
    "decay_attention",
    "delta_attention",
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
