"""Which implementation of an op serves a call: the reference, chunked torch, or a native CPU kernel."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

BACKENDS = ("reference", "torch", "native")
# Ops that have a native kernel; filled by latte.ops.native where its library is loaded.
NATIVE_OPS: set[str] = set()


def choose_backend(op: str, backend: str | None, tensor: Tensor) -> str:
    """The backend for a call of ``op`` on ``tensor``: the argument, else ``LATTE_BACKEND``, else the fastest that fits.

    Raises:
        ValueError: a name that is no backend, or ``native`` asked for by argument where it can't serve.
    """
    wanted = backend or os.environ.get("LATTE_BACKEND") or None
    if wanted is not None and wanted not in BACKENDS:
        raise ValueError(f"{op}: backend is {wanted!r}, expected one of {', '.join(BACKENDS)}")
    fits = op in NATIVE_OPS and tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)
    if backend == "native" and not fits:
        have = f"{op} on {tensor.device.type} in {tensor.dtype}"
        raise ValueError(
            f"{op}: no native kernel serves {have}, expected float32 or float64 on a CPU with the kernels built"
        )
    if wanted in ("reference", "torch"):
        return wanted
    return "native" if fits else "torch"


F = TypeVar("F", bound=Callable[..., Any])


def exact(op: F) -> F:
    """Decorator of ops: no autocast inside. A recurrence adds up what narrow products round off, token after token."""

    @functools.wraps(op)
    def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        kind = x.device.type
        if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
            return op(x, *args, **kwargs)
        with torch.autocast(kind, enabled=False):
            return op(x, *args, **kwargs)

    return run  # type: ignore[return-value]


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype recurrences run in: the input's, but never below float32."""
    return tensor.dtype if tensor.dtype == torch.float64 else torch.float32


def wide_dtype(device: torch.device) -> torch.dtype:
    """The dtype of log-normalisers in states: float64, where the device has it.

    After a million tokens a new one moves a log-sum by 1e-6, less than float32 resolves at that size: a float32
    normaliser would stop counting.
    """
    return torch.float32 if device.type == "mps" else torch.float64
