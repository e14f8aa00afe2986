"""Is this machine fine? Versions, devices, backends, and every op run against its reference."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from latte import memory
from latte.decode.stages import STAGES
from latte.mixers import names
from latte.ops import native
from latte.ops.registry import Draw, choose_backend, registered_ops
from latte.tokens import Tokens

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


def decoding() -> str:
    """Which mixers the decode engine reads in one native call a token, or why none."""
    if not native.available():
        return f"torch's modules ({native.describe()})"
    served = [name for name in names() if name in STAGES]
    return f"one native call a token for {', '.join(served)}; torch's modules for the others"


def allocation() -> str:
    """Which allocator serves, and what it does with large blocks."""
    return memory.allocation()


def check_ops(length: int = 193) -> Iterator[OpCheck]:
    """Run every registered op in float32 and float64, with padding and document boundaries, against its reference."""
    for dtype in TOLERANCE:
        for op in registered_ops():
            generator = torch.Generator().manual_seed(0)
            inputs, options = op.example(Draw(2, length, dtype, generator))
            if op.tokens:
                mask = torch.rand(2, length, generator=generator) > 0.1
                reset = torch.rand(2, length, generator=generator) < 0.02
                options["tokens"] = Tokens.of(inputs[0], mask=mask, reset=reset)
            wanted, found = (_outputs(op.call(*inputs, backend=backend, **options)) for backend in ("reference", None))
            error = float((found - wanted).abs().max() / wanted.abs().max())
            yield OpCheck(op.name, choose_backend(op.name, None, inputs[0]), dtype, error)


def _outputs(result: Tensor | tuple[Any, ...]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]
