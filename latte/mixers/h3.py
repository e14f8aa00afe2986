"""H3 (Fu et al., 2023): two state-space models with products between them, a shift and a diagonal one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.config import MixerConfig
from latte.layers.marks import Mark
from latte.mixers.base import Mixer
from latte.mixers.registry import register
from latte.ops import ComplexState, ConvState, causal_conv, complex_scan
from latte.ops.complex_scan import complex_product, unit_circle
from latte.ops.numbers import compute_dtype, wide_dtype
from latte.ops.recompute import recomputed
from latte.state import State, state
from latte.tokens import Tokens

#: Where the time steps start, log-uniform.
LEAST_STEP, LARGEST_STEP = 1e-3, 1e-1
#: Bounds the rate of decay away from 0.
SLOWEST = 1e-4
#: The state-space parameters learn more slowly, without weight decay.
SLOW = Mark(decay=False, float32=True, learning_rate=0.25)
# Tokens whose states are in memory at once: state_size numbers for every channel.
BLOCK = 128


@state
class H3State(State):
    shift: ConvState
    diagonal: ComplexState


@register("h3")
class H3Mixer(Mixer):
    """out = W_o (q . (S(k') . v))_t, k' = conv(k) + d_k . k, with S a diagonal state-space model of every channel:

        h_t = a h_{t-1} + (a - 1) / A . z_t    y_t = 2 Re(C . h_t) + d . z_t    z = k' . v,  a = e^{Delta A}

    q, k and v are projections with biases; the convolution is the shift model, a learned filter of ``shift_size`` taps.
    A starts at -1/2 + i pi n (S4D-Lin). Source: arXiv 2212.14052 with heads of width 1. There the model is discretised
    by the bilinear rule and computed by FFT; here by zero-order hold (an option there), as a scan over blocks, which
    costs as much memory for any length, and Re A = -1e-4 - e^{log_rate}, so that it never grows.
    """

    @dataclass(frozen=True)
    class Options:
        state_size: int = 64  # of each channel, of which half are computed: they come in conjugate pairs
        shift_size: int = 4

    examples = ({"state_size": 4}, {"state_size": 2, "shift_size": 1})
    published = {"h3": (21.0, 125)}  # noqa: RUF012
    marks: ClassVar[Mapping[str, Mark]] = {
        **dict.fromkeys(("log_rate", "frequency", "log_step"), SLOW),
        **dict.fromkeys(("skip", "shift_skip"), Mark(decay=False)),
    }

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        D, options = config.hidden_size, self.options
        if options.state_size < 2 or options.state_size % 2:
            raise ValueError(f"mixer 'h3': state_size is {options.state_size}, expected an even number, at least 2")
        if options.shift_size < 1:
            raise ValueError(f"mixer 'h3': shift_size is {options.shift_size}, expected at least 1")
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, D) for _ in range(3))
        self.shift_weight = nn.Parameter(torch.empty(D, options.shift_size))
        self.shift_skip, self.skip, self.log_step = (nn.Parameter(torch.empty(D)) for _ in range(3))
        self.log_rate, self.frequency = (nn.Parameter(torch.empty(D, options.state_size // 2)) for _ in range(2))
        self.out_weight = nn.Parameter(torch.empty(D, options.state_size // 2, 2))  # C
        self.o_proj = nn.Linear(D, D)
        self.o_proj.residual = True  # type: ignore[assignment]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.uniform_(self.log_step, math.log(LEAST_STEP), math.log(LARGEST_STEP))
        init.constant_(self.log_rate, math.log(0.5 - SLOWEST))
        index = torch.arange(self.options.state_size // 2, dtype=self.frequency.dtype, device=self.frequency.device)
        init.copy_(self.frequency, (math.pi * index).expand_as(self.frequency))
        init.normal_(self.out_weight, std=0.5**0.5)
        bound = self.options.shift_size**-0.5
        init.uniform_(self.shift_weight, -bound, bound)
        init.normal_(self.shift_skip)
        init.normal_(self.skip)

    def init_state(self, like_BTD: Tensor) -> H3State:
        D = self.config.hidden_size
        conv = ConvState.empty(like_BTD, self.options.shift_size, D)
        return H3State(conv, ComplexState.empty(like_BTD, D * self.options.state_size // 2))

    def discretised(self) -> tuple[Tensor, Tensor, Tensor]:
        """log |a| and arg a (D, N/2), in float64; and C (a - 1) / A (D, N/2, Z), which reads the state."""
        wide = wide_dtype(self.log_rate.device)
        rate, frequency = SLOWEST + self.log_rate.to(wide).clamp(max=40.0).exp(), self.frequency.to(wide)
        step_D1 = self.log_step.to(wide).clamp(max=10.0).exp()[:, None]
        log_r, theta = -rate * step_D1, frequency * step_D1
        change_Z = log_r.exp()[..., None] * unit_circle(theta) - theta.new_tensor([1.0, 0.0])
        inverse_Z = torch.stack([-rate, -frequency], dim=-1) / (rate**2 + frequency**2)[..., None]
        return log_r, theta, complex_product(complex_product(change_Z, inverse_Z), self.out_weight.to(wide))

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        dtype = compute_dtype(x_BTD)
        q, k, v = (proj(x_BTD).to(x_BTD.dtype) for proj in (self.q_proj, self.k_proj, self.v_proj))
        shifted, shift = causal_conv(k, self.shift_weight, state=state.shift, tokens=tokens)
        z_BTD = ((shifted + self.shift_skip * k) * v).to(dtype)
        log_r, theta, read = self.discretised()
        h_BPZ, outputs = state.diagonal.h_BPZ, []
        for block, part in enumerate(tokens.parts(BLOCK)):
            z = z_BTD[:, block * BLOCK : (block + 1) * BLOCK]
            y, h_BPZ = recomputed(_scanned, z, log_r, theta, read, h_BPZ, part)
            outputs.append(y)
        y_BTD = (torch.cat(outputs, dim=1) + self.skip.to(dtype) * z_BTD).to(x_BTD.dtype)
        out_BTD = self.o_proj(q * y_BTD).to(x_BTD.dtype)
        return tokens.zero_padding(out_BTD), H3State(shift, ComplexState(h_BPZ))

    def flops_per_token(self, context: int) -> int:
        return super().flops_per_token(context) + 8 * self.config.hidden_size * self.options.state_size


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
