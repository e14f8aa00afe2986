"""Blocks of a long row whose intermediate results are not kept for gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from latte.modes import transformed


def recomputed(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``; where gradients are wanted, only its arguments and results are kept, and it runs twice."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or transformed():
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
