"""The diagonal recurrence over complex numbers: each channel of the state decays and turns.

    h_t = e^{log r_t + i theta_t} h_{t-1} + b_t        log r_t <= 0

A complex number is a pair of floats along a last axis Z, the real part first. With phi_t the sum of the angles up to
token t, g_t = e^{-i phi_t} h_t obeys the real recurrence g_t = e^{log r_t} g_{t-1} + e^{-i phi_t} b_t, one
:func:`~latte.ops.scan.diagonal_scan` over twice as many channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from latte.ops.numbers import compute_dtype, wide_dtype
from latte.ops.registry import Draw, Example, operation
from latte.ops.scan import ScanState, diagonal_scan
from latte.shapes import Axes, given
from latte.state import State, require_state, state
from latte.tokens import Tokens, require_tokens

# Tokens over which the chunked form sums angles.
BLOCK = 256


@state
class ComplexState(State):
    """The last value of the recurrence, as pairs of floats."""

    h_BPZ: Tensor

    @classmethod
    def empty(cls, like_BT: Tensor, size: int) -> ComplexState:
        return cls(torch.zeros(like_BT.shape[0], size, 2, dtype=compute_dtype(like_BT), device=like_BT.device))


def complex_product(x_Z: Tensor, y_Z: Tensor) -> Tensor:
    """x y, of complex numbers as pairs."""
    (a, b), (c, d) = x_Z.unbind(-1), y_Z.unbind(-1)
    return torch.stack([a * c - b * d, a * d + b * c], dim=-1)


def unit_circle(angle: Tensor) -> Tensor:
    """e^{i angle} as pairs."""
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def either_way(form: Callable[..., tuple[Tensor, ComplexState]]) -> Callable[..., tuple[Tensor, ComplexState]]:
    """A form that reads from left to right, with an argument ``reverse`` to read from right to left."""

    @functools.wraps(form)
    def read(
        b_BTPZ: Tensor, log_r: Tensor, theta: Tensor, reverse: bool, state: ComplexState, tokens: Tokens
    ) -> tuple[Tensor, ComplexState]:
        if not reverse:
            return form(b_BTPZ, log_r, theta, state, tokens)
        flipped = (x if x.dim() == 1 else x.flip(1) for x in (b_BTPZ, log_r, theta))
        h_BTPZ, after = form(*flipped, state, tokens.reversed)
        return h_BTPZ.flip(1), after

    return read


@either_way
def complex_scan_reference(
    b_BTPZ: Tensor, log_r: Tensor, theta: Tensor, state: ComplexState, tokens: Tokens
) -> tuple[Tensor, ComplexState]:
    """The recurrence as written, token by token, in float64: a constant factor repeats its rounding at every token."""
    a_BTPZ = (log_r.exp()[..., None] * unit_circle(theta)).expand(b_BTPZ.shape)
    b, h_BPZ = b_BTPZ.to(a_BTPZ.dtype), state.h_BPZ.to(a_BTPZ.dtype)
    outputs = []
    for t in range(b.shape[1]):
        if tokens.reset is not None:
            h_BPZ = torch.where(tokens.reset[:, t, None, None], 0.0, h_BPZ)
        read_BPZ = complex_product(a_BTPZ[:, t], h_BPZ) + b[:, t]
        h_BPZ = read_BPZ if tokens.mask is None else torch.where(tokens.mask[:, t, None, None], read_BPZ, h_BPZ)
        outputs.append(h_BPZ)
    h_BTPZ = tokens.zero_padding(torch.stack(outputs, dim=1))
    return h_BTPZ.to(b_BTPZ.dtype), ComplexState(h_BPZ.to(b_BTPZ.dtype))


@either_way
def complex_scan_chunked(
    b_BTPZ: Tensor, log_r: Tensor, theta: Tensor, state: ComplexState, tokens: Tokens
) -> tuple[Tensor, ComplexState]:
    """Turn back by phi, scan by doubling, turn forth, one block of tokens after another: linear time and memory.

    phi starts from 0 in each block: the gradient to an angle is a difference of two sums over the tokens after it, and
    in float32 its error grows with their number.
    """
    outputs = []
    for start, part in zip(range(0, tokens.length, BLOCK), tokens.parts(BLOCK), strict=True):
        b, r, angle = (x if x.dim() == 1 else x[:, start : start + BLOCK] for x in (b_BTPZ, log_r, theta))
        h_BTPZ, state = _unwound(b, r.to(b.dtype), angle, state, part, "torch")
        outputs.append(h_BTPZ)
    return torch.cat(outputs, dim=1), state


@either_way
def _native(
    b_BTPZ: Tensor, log_r: Tensor, theta: Tensor, state: ComplexState, tokens: Tokens
) -> tuple[Tensor, ComplexState]:
    # In float64: the kernel computes e^{log r} for every token, and in float32 its rounding, 3e-8 each, adds up where r
    # is constant. Doubling sums log r instead.
    h_BTPZ, after = _unwound(b_BTPZ.double(), log_r, theta, ComplexState(state.h_BPZ.double()), tokens, "native")
    return h_BTPZ.to(b_BTPZ.dtype), ComplexState(after.h_BPZ.to(b_BTPZ.dtype))


def _unwound(
    b_BTPZ: Tensor, log_r: Tensor, theta: Tensor, state: ComplexState, tokens: Tokens, backend: str
) -> tuple[Tensor, ComplexState]:
    """The scan of g between two rotations, in b's dtype; angles are summed in their own, float64."""
    B, T, P, _ = b_BTPZ.shape
    phi_BTP, end_BP = _angles(theta, tokens, backend)
    forth_BTPZ, back_BTPZ, end_BPZ = (unit_circle(angle).to(b_BTPZ.dtype) for angle in (phi_BTP, -phi_BTP, end_BP))
    g_BTD, after = diagonal_scan(
        log_r.repeat_interleave(2, dim=-1).expand(B, T, 2 * P),
        complex_product(b_BTPZ, back_BTPZ).flatten(2),
        state=ScanState(state.h_BPZ.flatten(1)),
        tokens=tokens,
        backend=backend,
    )
    h_BTPZ = complex_product(g_BTD.unflatten(2, (P, 2)), forth_BTPZ)
    return h_BTPZ, ComplexState(complex_product(after.h_BD.unflatten(1, (P, 2)), end_BPZ))


def _angles(theta: Tensor, tokens: Tokens, backend: str) -> tuple[Tensor, Tensor]:
    """phi (B or 1, T, P) and its last value (B or 1, P): the sum over the real tokens from 0 in each document.

    No gradient passes a boundary then, not even as the rounding of a difference of two sums.
    """
    if theta.dim() == 3:
        phi_BTP, after = diagonal_scan(torch.zeros_like(theta), theta, tokens=tokens, backend=backend)
        return phi_BTP, after.h_BD
    count_BT = tokens.in_row_BT[:1] if tokens.plain else tokens.in_row_BT
    phi_BTP = count_BT[..., None] * theta
    return phi_BTP, phi_BTP[:, -1]


def _example(draw: Draw) -> Example:
    b, log_r, theta = draw.normal(draw.B, draw.T, 8, 2), draw.normal(draw.B, draw.T, 8), draw.normal(draw.B, draw.T, 8)
    return (b, -log_r.abs(), theta), {}


@operation(
    reference=complex_scan_reference,
    chunked=complex_scan_chunked,
    step=complex_scan_reference,
    native=_native,
    example=_example,
)
def complex_scan(
    b_BTPZ: Tensor,
    log_r: Tensor,
    theta: Tensor,
    *,
    reverse: bool = False,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """h_t = e^{log r_t + i theta_t} h_{t-1} + b_t for P complex channels; computed in float32 or better.

    Shapes: b (B, T, P, 2); log_r (at most 0) and theta (P,), constant, or (B, T, P), each in b's dtype or in float64.
    With ``reverse`` it runs from the last token to the first, within the same documents, and the state enters at the
    right. Returns h (B, T, P, 2), 0 at padding, and the :class:`ComplexState` after these tokens.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, or a state of something else.
    """
    axes, wide = Axes("complex_scan"), wide_dtype(b_BTPZ.device)
    sizes = axes.bind("b", b_BTPZ, "BTPZ")
    if sizes["Z"] != 2:
        raise ValueError(f"complex_scan: b has shape {given(b_BTPZ)}, expected (B, T, P, 2)")
    for name, tensor in (("log_r", log_r), ("theta", theta)):
        if tensor.dim() not in (1, 3):
            raise ValueError(f"complex_scan: {name} has shape {given(tensor)}, expected (P,) or (B, T, P)")
        axes.bind(
            name, tensor.to(b_BTPZ.dtype) if tensor.dtype == wide else tensor, "P" if tensor.dim() == 1 else "BTP"
        )
    b = b_BTPZ.to(compute_dtype(b_BTPZ))
    tokens = require_tokens("complex_scan", tokens, b, state)
    before = require_state("complex_scan", state, ComplexState.empty(b, sizes["P"]))
    return b, log_r.to(wide), theta.to(wide), reverse, before, tokens
