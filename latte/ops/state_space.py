"""Diagonal state-space models of every channel: N complex states of constant pace, and what is read from them.

    h_t[d,n] = a[d,n] h_{t-1}[d,n] + z_t[d]        y_t[d] = 2 Re sum_n c[d,n] h_t[d,n]        a = e^{log r + i theta}

From an empty state y is the convolution of z with the kernel K_l = 2 Re sum_n c a^l. Written out for a whole row the
states would be 2N times its activations: torch forms either compute the kernel and convolve by FFT, or scan over blocks
of tokens; the native form keeps a state for every 64 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops import native
from latte.ops.complex_scan import ComplexState, complex_product, complex_scan, complex_scan_reference, unit_circle
from latte.ops.nonfinite import contained
from latte.ops.numbers import compute_dtype, wide_dtype
from latte.ops.recompute import recomputed
from latte.ops.registry import Draw, Example, operation
from latte.shapes import Axes, given
from latte.state import State, require_state
from latte.tokens import Tokens, require_tokens

# Tokens whose states are in memory at once where blocks are scanned.
BLOCK = 128
# Tokens that are convolved directly; rows that are not longer are scanned.
DIRECT = 64


def state_space_reference(
    z_BTD: Tensor, log_r_DN: Tensor, theta_DN: Tensor, read_DNZ: Tensor, state: ComplexState, tokens: Tokens
) -> tuple[Tensor, ComplexState]:
    """The recurrence as written, token by token."""
    b_BTPZ, read_PZ = _entered(z_BTD, log_r_DN.shape[1]), read_DNZ.flatten(0, 1)
    h_BTPZ, after = complex_scan_reference(b_BTPZ, log_r_DN.flatten(), theta_DN.flatten(), False, state, tokens)
    y_BTPZ = complex_product(read_PZ.to(h_BTPZ.dtype), h_BTPZ)
    return 2 * y_BTPZ[..., 0].unflatten(2, log_r_DN.shape).sum(-1), after


def state_space_chunked(
    z_BTD: Tensor, log_r_DN: Tensor, theta_DN: Tensor, read_DNZ: Tensor, state: ComplexState, tokens: Tokens
) -> tuple[Tensor, ComplexState]:
    """By FFT where rows are longer than a few tokens and hold one document without padding, otherwise by scans."""
    fits = tokens.plain and tokens.length > DIRECT and not torch.compiler.is_compiling()
    form = state_space_fft if fits else state_space_scanned
    return form(z_BTD, log_r_DN, theta_DN, read_DNZ, state, tokens)


def state_space_scanned(
    z_BTD: Tensor, log_r_DN: Tensor, theta_DN: Tensor, read_DNZ: Tensor, state: ComplexState, tokens: Tokens
) -> tuple[Tensor, ComplexState]:
    """Scans of one block of tokens after another, computed twice for gradients: linear time and memory."""
    h_BPZ, outputs = state.h_BPZ, []
    for block, part in enumerate(tokens.parts(BLOCK)):
        z = z_BTD[:, block * BLOCK : (block + 1) * BLOCK]
        y, h_BPZ = recomputed(_scanned, z, log_r_DN, theta_DN, read_DNZ, h_BPZ, part)
        outputs.append(y)
    return torch.cat(outputs, dim=1), ComplexState(h_BPZ)


def _scanned(
    z_BTD: Tensor, log_r_DN: Tensor, theta_DN: Tensor, read_DNZ: Tensor, h_BPZ: Tensor, tokens: Tokens
) -> tuple[Tensor, Tensor]:
    """y (B, T, D) of a block, and h after it."""
    b_BTPZ, state = _entered(z_BTD, log_r_DN.shape[1]), ComplexState(h_BPZ)
    h_BTPZ, after = complex_scan(b_BTPZ, log_r_DN.flatten(), theta_DN.flatten(), state=state, tokens=tokens)
    read = _real_read(read_DNZ).to(h_BTPZ.dtype)
    return torch.einsum("btdnz,dnz->btd", h_BTPZ.unflatten(2, log_r_DN.shape), read), after.h_BPZ


def _entered(z_BTD: Tensor, slots: int) -> Tensor:
    """z for each of a channel's slots, as complex numbers (B, T, P, 2)."""
    b_BTP = z_BTD[..., None].expand(-1, -1, -1, slots).flatten(2)
    return torch.stack([b_BTP, torch.zeros_like(b_BTP)], dim=-1)


def _real_read(read_DNZ: Tensor) -> Tensor:
    """Weights of the real and imaginary parts: 2 Re(c h) = 2 Re c Re h - 2 Im c Im h."""
    return read_DNZ * read_DNZ.new_tensor([2.0, -2.0])


@contained(numbers=(0,))
def state_space_fft(
    z_BTD: Tensor, log_r_DN: Tensor, theta_DN: Tensor, read_DNZ: Tensor, state: ComplexState, tokens: Tokens
) -> tuple[Tensor, ComplexState]:
    """A convolution with the kernel, for rows of one document without padding: T log^2 T, memory linear in T.

    Tokens of a block of 64 are convolved directly. What the first half of a block of 128, 256, ... adds to its second
    half is an FFT of that block. So no output meets a later token, not even as rounding, as in one FFT of the row.
    """
    T, D, dtype = z_BTD.shape[1], z_BTD.shape[2], z_BTD.dtype
    blocks = -(-T // DIRECT)
    within_DNCZ = _powers(log_r_DN, theta_DN, torch.arange(DIRECT, device=z_BTD.device))
    starts_DNJZ = _powers(log_r_DN, theta_DN, DIRECT * torch.arange(blocks, device=z_BTD.device))
    # 2 Re(c a^{64 j} a^i) as a product of matrices over slots and parts.
    right_DQC = within_DNCZ.transpose(2, 3).flatten(1, 2).to(dtype)
    left_DJQ = _rows(complex_product(read_DNZ[:, :, None], starts_DNJZ), dtype)
    kernel_DT = (left_DJQ @ right_DQC).flatten(1)
    z_BDT = F.pad(z_BTD.transpose(1, 2), (0, blocks * DIRECT - T))
    y_BDT = _convolved(z_BDT, kernel_DT)
    # The state: read a^{t+1} h_0, and a^T h_0 + sum_s a^{T-1-s} z_s.
    first_DNZ = log_r_DN.exp()[..., None] * unit_circle(theta_DN)
    h_BDNZ = state.h_BPZ.to(log_r_DN.dtype).unflatten(1, (D, -1))
    seen_BDNZ = complex_product(complex_product(read_DNZ, first_DNZ), h_BDNZ)
    left_BDJQ = _rows(complex_product(seen_BDNZ[:, :, :, None], starts_DNJZ), dtype)
    y_BDT = y_BDT + (left_BDJQ @ right_DQC).flatten(2)
    # By blocks from the right end: token T - 1 - (64 j + i) enters by a^{64 j} a^i.
    z_BDJC = F.pad(z_BTD.transpose(1, 2).flip(2), (0, blocks * DIRECT - T)).unflatten(2, (blocks, DIRECT))
    sums_BDJQ = torch.einsum("bdjc,dqc->bdjq", z_BDJC, right_DQC)
    sums_BDNJZ = sums_BDJQ.unflatten(3, (-1, 2)).transpose(2, 3).to(log_r_DN.dtype)
    added_BDNZ = complex_product(sums_BDNJZ, starts_DNJZ).sum(3)
    faded_BDNZ = complex_product(_powers(log_r_DN, theta_DN, torch.tensor([T], device=z_BTD.device))[:, :, 0], h_BDNZ)
    after_BPZ = (added_BDNZ + faded_BDNZ).flatten(1, 2).to(state.h_BPZ.dtype)
    return y_BDT[..., :T].transpose(1, 2).contiguous(), ComplexState(after_BPZ)


def _powers(log_r_DN: Tensor, theta_DN: Tensor, power_L: Tensor) -> Tensor:
    """a^l (D, N, L, 2), in float64: angles of many turns lose their digits otherwise."""
    power = power_L.to(log_r_DN.dtype)
    return (log_r_DN[..., None] * power).exp()[..., None] * unit_circle(theta_DN[..., None] * power)


def _rows(x_DNJZ: Tensor, dtype: torch.dtype) -> Tensor:
    """(..., J, N Z), so that the product with real and imaginary parts is 2 Re."""
    return _real_read(x_DNJZ).transpose(-3, -2).flatten(-2).to(dtype)


def _convolved(z_BDT: Tensor, kernel_DT: Tensor) -> Tensor:
    """sum_{s<=t} K_{t-s} z_s for a multiple of DIRECT tokens."""
    B, _, T = z_BDT.shape
    lag_CC = torch.arange(DIRECT, device=z_BDT.device) - torch.arange(DIRECT, device=z_BDT.device)[:, None]
    taps_DCC = torch.where(lag_CC >= 0, kernel_DT[:, lag_CC.clamp(min=0)], 0.0)
    z_DMC = z_BDT.unflatten(2, (-1, DIRECT)).transpose(0, 1).flatten(1, 2)
    y_BDT = (z_DMC @ taps_DCC).unflatten(1, (B, -1)).transpose(0, 1).flatten(2)
    half = DIRECT
    while half < T:
        size = 2 * half
        extra = -T % size
        left = F.pad(z_BDT, (0, extra)).unflatten(2, (-1, size))[..., :half]
        taps = F.pad(kernel_DT[:, :size], (0, max(0, size - T)))
        right = torch.fft.irfft(torch.fft.rfft(left, n=size) * torch.fft.rfft(taps)[:, None], n=size)[..., half:]
        y_BDT = y_BDT + F.pad(right, (half, 0)).flatten(2)[..., :T]
        half = size
    return y_BDT


def _native(
    z_BTD: Tensor, log_r_DN: Tensor, theta_DN: Tensor, read_DNZ: Tensor, state: ComplexState, tokens: Tokens
) -> tuple[Tensor, ComplexState]:
    h_BDNZ = state.h_BPZ.double().unflatten(1, log_r_DN.shape)
    a_DNZ = log_r_DN.exp()[..., None] * unit_circle(theta_DN)
    y_BTD, after_BDNZ = native.state_space(z_BTD, a_DNZ, _real_read(read_DNZ), h_BDNZ, tokens.mask, tokens.reset)
    return y_BTD, ComplexState(after_BDNZ.flatten(1, 2).to(state.h_BPZ.dtype))


def _example(draw: Draw) -> Example:
    return (draw.normal(draw.B, draw.T, 8), -draw.normal(8, 4).abs(), draw.normal(8, 4), draw.normal(8, 4, 2)), {}


@operation(
    reference=state_space_reference,
    chunked=state_space_chunked,
    step=state_space_reference,
    native=_native,
    example=_example,
)
def state_space(
    z_BTD: Tensor,
    log_r_DN: Tensor,
    theta_DN: Tensor,
    read_DNZ: Tensor,
    *,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """y_t = 2 Re sum_n c h_t, h_t = e^{log r + i theta} h_{t-1} + z_t for N complex states of each of D channels.

    Shapes: z (B, T, D); log_r (at most 0) and theta (D, N) and read c (D, N, 2), each in z's dtype or in float64.
    Computed in float32 or better, powers in float64. Returns y (B, T, D), 0 at padding, and the :class:`ComplexState`
    of D N channels after these tokens.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, or a state of something else.
    """
    axes, wide = Axes("state_space"), wide_dtype(z_BTD.device)
    z = z_BTD.to(compute_dtype(z_BTD))
    axes.bind("z", z, "BTD")
    for name, tensor, letters in (("log_r", log_r_DN, "DN"), ("theta", theta_DN, "DN"), ("read", read_DNZ, "DNZ")):
        sizes = axes.bind(name, tensor.to(z.dtype) if tensor.dtype in (wide, z_BTD.dtype) else tensor, letters)
    if sizes["Z"] != 2:
        raise ValueError(f"state_space: read has shape {given(read_DNZ)}, expected (D, N, 2)")
    tokens = require_tokens("state_space", tokens, z, state)
    before = require_state("state_space", state, ComplexState.empty(z, sizes["D"] * sizes["N"]))
    return z, log_r_DN.to(wide), theta_DN.to(wide), read_DNZ.to(wide), before, tokens
