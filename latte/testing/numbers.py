"""Random inputs and closeness, for tests of ops, mixers and models."""

from __future__ import annotations

import torch
from torch import Tensor

from latte.state import State

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


def flags(g: torch.Generator, B: int, T: int, share: float) -> Tensor:
    return torch.rand(B, T, generator=g) < share


def assert_close(got: Tensor, expected: Tensor, tolerance: float | None = None, what: str = "values") -> None:
    """``got`` within ``tolerance`` (by dtype, see TOLERANCE) of ``expected``, relative to its largest value."""
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if tolerance is None:
        tolerance = TOLERANCE[got.dtype]
    assert torch.isfinite(got).all(), f"{what}: not finite"
    if got.numel() == 0:
        return
    difference = (got.double() - expected.double()).abs().max().item()
    size = expected.double().abs().max().item()
    assert difference <= tolerance * max(size, 1e-3), f"{what}: off by {difference:.2e}, largest value {size:.2e}"


def assert_states_close(got: State, expected: State) -> None:
    """All tensors of two states, counts exactly; logs of empty sums as the same emptiness."""
    mine, wanted = dict(got.tensors()), dict(expected.tensors())
    assert mine.keys() == wanted.keys()
    for path, tensor in mine.items():
        other = wanted[path]
        if not tensor.is_floating_point():
            assert torch.equal(tensor, other), path
            continue
        empty = other < -1e29
        assert torch.equal(tensor < -1e29, empty), f"{path}: other sums are empty"
        # A log-normaliser is float64 in a float32 state: its digits come from float32 logits.
        low = any(t.dtype == torch.float32 for t in mine.values())
        tolerance = TOLERANCE[torch.float32 if low else torch.float64]
        zero = torch.zeros((), dtype=tensor.dtype)
        assert_close(torch.where(empty, zero, tensor), torch.where(empty, zero, other), tolerance, path)
