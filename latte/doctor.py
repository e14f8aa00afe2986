"""Is this machine fine? Versions, devices, backends, and every op run against its reference."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from latte import memory, ops
from latte.ops import native
from latte.ops.backends import choose_backend

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "accelerate", "datasets")
#: Largest difference from the reference, relative to its largest value, that counts as the same.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@dataclass(frozen=True)
class OpCheck:
    """One op on this machine: what serves it, and how far that is from its reference."""

    op: str
    backend: str
    dtype: torch.dtype
    error: float

    @property
    def passed(self) -> bool:
        return self.error <= TOLERANCE[self.dtype]


def versions() -> dict[str, str]:
    """Python and the packages that numbers depend on."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}}


def device() -> str:
    """The device that torch would train on, and this machine's processor."""
    name = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return f"{name or 'cpu'} ({platform.machine()}, {platform.system()})"


def kernels() -> str:
    """Which native kernels serve here, or why none do."""
    return native.describe()


def allocation() -> str:
    """Which allocator serves, and what it does with large blocks."""
    return memory.allocation()


def check_ops(tokens: int = 193) -> Iterator[OpCheck]:
    """Run every op in float32 and float64, with padding and document boundaries, against its reference."""
    B, T, H, G, K, V = 2, tokens, 4, 2, 16, 24
    for dtype in TOLERANCE:
        torch_random = torch.Generator().manual_seed(0)
        draw = partial(torch.randn, dtype=dtype, generator=torch_random)
        mask = torch.rand(B, T, generator=torch_random) > 0.1
        reset = torch.rand(B, T, generator=torch_random) < 0.02
        flags: dict[str, Any] = {"mask": mask, "reset": reset}
        documents: dict[str, Any] = {"mask": mask, "segments": reset.long().cumsum(1)}
        q, k, v = draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V)
        p, few_k, few_v = q.softmax(-1), k[:, :, :G], v[:, :, :G]
        log_a, b, gate, taps = -draw(B, T, K).abs(), draw(B, T, K), -draw(B, T, H, K).abs(), draw(K, 4)
        calls: dict[str, Callable[..., Any]] = {
            "causal_latte": partial(ops.causal_latte, p, k, v, **flags),
            "bidirectional_latte": partial(ops.bidirectional_latte, p, k, v, **documents),
            "window_attention": partial(ops.window_attention, q, few_k, few_v, left=20, sinks=2, softcap=9.0, **flags),
            "softmax_attention": partial(ops.softmax_attention, q, few_k, few_v, **flags),
            "decay_attention": partial(ops.decay_attention, q, k, v, gate, **flags),
            "document_attention": partial(ops.document_attention, q, k, v, **documents),
            "diagonal_scan": partial(ops.diagonal_scan, log_a, b, **flags),
            "causal_conv": partial(ops.causal_conv, b, taps, **flags),
        }
        for name, call in calls.items():
            wanted, found = (_outputs(call(backend=backend)) for backend in ("reference", None))
            error = float((found - wanted).abs().max() / wanted.abs().max())
            yield OpCheck(name, choose_backend(name, None, q), dtype, error)


def _outputs(result: Tensor | tuple[Tensor, Any]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]
