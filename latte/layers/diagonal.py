"""Diagonal state-space models of every channel, as mixers share them: discretised, and run over blocks of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from latte.layers.marks import Mark
from latte.ops import ComplexState, complex_scan
from latte.ops.complex_scan import complex_product, unit_circle
from latte.ops.numbers import wide_dtype
from latte.ops.recompute import recomputed
from latte.tokens import Tokens

#: Bounds the rate of decay away from 0.
SLOWEST = 1e-4
#: The state-space parameters learn more slowly, without weight decay.
SLOW = Mark(decay=False, float32=True, learning_rate=0.25)
# Tokens whose states are in memory at once: state_size numbers for every channel.
BLOCK = 128


def zero_order_hold(
    log_rate_DN: Tensor, frequency_DN: Tensor, log_step_D: Tensor, out_weight_DNZ: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """log |a| and arg a (D, N), in float64; and C (a - 1) / A (D, N, Z), which reads the state.

    A = -1e-4 - e^{log_rate} + i frequency and a = e^{A Delta}, Delta = e^{log_step}: one of each pair of conjugates.
    """
    wide = wide_dtype(log_rate_DN.device)
    rate, frequency = SLOWEST + log_rate_DN.to(wide).clamp(max=40.0).exp(), frequency_DN.to(wide)
    step_D1 = log_step_D.to(wide).clamp(max=10.0).exp()[:, None]
    log_r, theta = -rate * step_D1, frequency * step_D1
    change_Z = log_r.exp()[..., None] * unit_circle(theta) - theta.new_tensor([1.0, 0.0])
    inverse_Z = torch.stack([-rate, -frequency], dim=-1) / (rate**2 + frequency**2)[..., None]
    return log_r, theta, complex_product(complex_product(change_Z, inverse_Z), out_weight_DNZ.to(wide))


def diagonal_model(
    z_BTD: Tensor, log_r_DN: Tensor, theta_DN: Tensor, read_DNZ: Tensor, state: ComplexState, tokens: Tokens
) -> tuple[Tensor, ComplexState]:
    """2 Re(C . h_t) (B, T, D), h_t = a h_{t-1} + z_t for each of N states of a channel; and the state after it."""
    h_BPZ, outputs = state.h_BPZ, []
    for block, part in enumerate(tokens.parts(BLOCK)):
        z = z_BTD[:, block * BLOCK : (block + 1) * BLOCK]
        y, h_BPZ = recomputed(_scanned, z, log_r_DN, theta_DN, read_DNZ, h_BPZ, part)
        outputs.append(y)
    return torch.cat(outputs, dim=1), ComplexState(h_BPZ)


def _scanned(
    z_BTD: Tensor, log_r_DN: Tensor, theta_DN: Tensor, read_DNZ: Tensor, h_BPZ: Tensor, tokens: Tokens
) -> tuple[Tensor, Tensor]:
    """2 Re(C . h) (B, T, D) of a block, and h after it."""
    D, N = log_r_DN.shape
    b_BTP = z_BTD[..., None].expand(-1, -1, -1, N).flatten(2)
    b_BTPZ = torch.stack([b_BTP, torch.zeros_like(b_BTP)], dim=-1)
    state = ComplexState(h_BPZ)
    h_BTPZ, after = complex_scan(b_BTPZ, log_r_DN.flatten(), theta_DN.flatten(), state=state, tokens=tokens)
    # Re(c h) = Re c Re h - Im c Im h.
    conjugate_DNZ = (read_DNZ * read_DNZ.new_tensor([2.0, -2.0])).to(h_BTPZ.dtype)
    return torch.einsum("btdnz,dnz->btd", h_BTPZ.unflatten(2, (D, N)), conjugate_DNZ), after.h_BPZ
