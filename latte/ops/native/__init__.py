"""Kernels in C++ for the CPU, registered as torch operators (fake tensors, gradients, torch.compile).

Where the library was not built, `available()` is False and `describe()` says why; the functions then raise
RuntimeError. Importing this package tells `latte.ops` which ops have a kernel.
"""

from latte.ops.backends import NATIVE_OPS
from latte.ops.native.decay import decay_attention
from latte.ops.native.latte import EMPTY, causal_latte
from latte.ops.native.library import available, describe
from latte.ops.native.scan import diagonal_scan
from latte.ops.native.window import window_attention

__all__ = [
    "EMPTY",
    "available",
    "causal_latte",
    "decay_attention",
    "describe",
    "diagonal_scan",
    "window_attention",
]

if available():
    NATIVE_OPS.update(("causal_latte", "decay_attention", "diagonal_scan", "window_attention"))
