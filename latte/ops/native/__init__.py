"""Kernels in C++ for the CPU, registered as torch operators (fake tensors, gradients, torch.compile).

Where the library was not built, `available()` is False and `describe()` says why; the functions then raise
RuntimeError.
"""

from latte.ops.native.latte import EMPTY, causal_latte
from latte.ops.native.library import available, describe
from latte.ops.native.window import window_attention

__all__ = ["EMPTY", "available", "causal_latte", "describe", "window_attention"]
