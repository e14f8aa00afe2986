"""The letters that name tensor axes throughout the package, and the checks that hold callers to them.

A name such as ``q_BTHM`` says what its axes are:

    B  rows of the batch            H  query heads
    T  tokens (queries)             G  key/value heads (H is a multiple of G)
    S  tokens looked at (keys)      M  latents per head
    D  model width                  K  key width per head
    N  chunks                       V  value width per head
    C  tokens in a chunk            Z  real and imaginary part
    L  levels of a hierarchy        P  channels of a diagonal state

Padding and documents of the (B, T) tokens are described by :class:`latte.tokens.Tokens`.
"""

from __future__ import annotations

from torch import Tensor


def given(tensor: Tensor) -> str:
    """How an error names a shape: ``(2, 5, 4, 8)``."""
    return "(" + ", ".join(str(int(n)) for n in tensor.shape) + ")"


class Axes:
    """Binds axis letters to sizes on first sight and holds every later tensor to them.

    >>> axes = Axes("causal_latte")
    >>> axes.bind("p", torch.zeros(2, 5, 4, 8), "BTHM")["M"]
    8

    Raises:
        ValueError: a tensor of another rank, size, dtype or device than the ones bound before it, or with no tokens.
    """

    def __init__(self, op: str) -> None:
        self.op = op
        self.sizes: dict[str, int] = {}
        self.first: tuple[str, Tensor] | None = None

    def bind(self, name: str, tensor: Tensor, axes: str) -> dict[str, int]:
        """Check a floating-point tensor against ``axes`` and return the sizes known so far."""
        if not tensor.is_floating_point():
            raise ValueError(f"{self.op}: {name} has dtype {tensor.dtype}, expected a floating-point dtype")
        self._shape(name, tensor, axes)
        if self.first is None:
            self.first = (name, tensor)
        other_name, other = self.first
        if tensor.device != other.device:
            raise ValueError(f"{self.op}: {name} is on {tensor.device}, but {other_name} is on {other.device}")
        if tensor.dtype != other.dtype:
            raise ValueError(f"{self.op}: {name} is {tensor.dtype}, but {other_name} is {other.dtype}")
        return self.sizes

    def _shape(self, name: str, tensor: Tensor, axes: str) -> None:
        if tensor.dim() != len(axes):
            raise ValueError(
                f"{self.op}: {name} has shape {given(tensor)}, expected {len(axes)} axes ({', '.join(axes)})"
            )
        for axis, size in zip(axes, tensor.shape, strict=True):
            if size == 0:
                raise ValueError(
                    f"{self.op}: {name} has shape {given(tensor)}: axis {axis} is empty, expected at least 1"
                )
            if self.sizes.setdefault(axis, size) != size:
                wanted = ", ".join(f"{a}={self.sizes[a]}" if a in self.sizes else a for a in axes)
                raise ValueError(f"{self.op}: {name} has shape {given(tensor)}, expected ({wanted})")


def require_divides(op: str, small: int, large: int, small_name: str, large_name: str) -> None:
    """Raise ValueError unless ``large`` is a positive multiple of ``small``."""
    if small < 1 or large < 1 or large % small:
        raise ValueError(f"{op}: {large_name} is {large}, expected a positive multiple of {small_name} ({small})")
