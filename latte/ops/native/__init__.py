"""Kernels in C++ for the CPU, registered as torch operators (fake tensors, gradients, torch.compile).

Where the library was not built, `available()` is False and `describe()` says why; the functions then raise
RuntimeError. Ops name their kernel where they are registered (latte/ops/registry.py).
"""

from latte.ops.native.blocks import FORMATS as BLOCK_FORMATS
from latte.ops.native.conv import causal_conv
from latte.ops.native.decay import decay_attention
from latte.ops.native.delta import delta_attention
from latte.ops.native.filters import kalman, selective_scan, state_space
from latte.ops.native.kept import kept_attention, kept_select
from latte.ops.native.latte import EMPTY, causal_latte
from latte.ops.native.library import available, describe
from latte.ops.native.pointwise import rms_norm, rotate, swiglu
from latte.ops.native.product import FEW_ROWS, products
from latte.ops.native.program import ACTIVATIONS, OUTPUT, Call, memory_words, pack, stages, words_of
from latte.ops.native.rglru import rglru
from latte.ops.native.scan import diagonal_scan
from latte.ops.native.window import window_attention

__all__ = [
    "ACTIVATIONS",
    "BLOCK_FORMATS",
    "EMPTY",
    "FEW_ROWS",
    "OUTPUT",
    "Call",
    "available",
    "causal_conv",
    "causal_latte",
    "decay_attention",
    "delta_attention",
    "describe",
    "diagonal_scan",
    "kalman",
    "kept_attention",
    "kept_select",
    "memory_words",
    "pack",
    "products",
    "rglru",
    "rms_norm",
    "rotate",
    "selective_scan",
    "stages",
    "state_space",
    "swiglu",
    "window_attention",
    "words_of",
]
