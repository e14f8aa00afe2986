"""S5 (Smith et al., 2023): one diagonal state-space model over all channels, with complex states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.config import MixerConfig
from latte.layers.linear import TokenLinear
from latte.layers.marks import Mark
from latte.mixers.base import Mixer, Preset
from latte.mixers.registry import register
from latte.ops import ComplexState, complex_scan
from latte.ops.complex_scan import complex_product, unit_circle
from latte.ops.numbers import compute_dtype, wide_dtype
from latte.shapes import require_divides
from latte.state import State
from latte.tokens import Tokens

ACTIVATIONS = ("half_glu1", "half_glu2", "none")
#: Bounds Re Lambda away from 0.
SLOWEST = 1e-4
#: State-space parameters learn more slowly, without weight decay; the source's runs have factors of 1/5 to 1/2.
SLOW = Mark(decay=False, float32=True, learning_rate=0.25)


@register("s5")
class S5Mixer(Mixer):
    """h_t = a . h_{t-1} + E u_t, y_t = 2 Re(C h_t) + d . u_t, then an activation with a gate.

        a = e^{Lambda Delta}    E = Lambda^{-1} (a - 1) B    (zero-order hold; Delta = e^{log_step}, one per state)
        half_glu1: z = gelu(y), out = z . sigmoid(W z + w)    half_glu2: out = y . sigmoid(W gelu(y) + w)

    Lambda is diagonal and complex. States come in conjugate pairs, of which one is computed: hence 2 Re. If
    bidirectional, the same a and E run in both directions and C reads the states of both. Linear time, constant state.

    Two departures from the source. There Re Lambda is free, or clipped, which stops its gradient: a free one can drift
    above 0 and overflow in long rows. Here Re Lambda = -1e-4 - e^{log_rate}, from the same start, -1/2. And there a
    batch norm precedes the layer, so that a token depends on other rows and later tokens; here it is the block's norm.
    """

    @dataclass(frozen=True)
    class Options:
        state_size: int = 64  # P, of which P/2 are computed
        num_blocks: int = 4  # of the initial state matrix, J
        activation: str = "half_glu1"  # or half_glu2, none
        dt_min: float = 1e-3  # Delta starts log-uniform in [dt_min, dt_max]
        dt_max: float = 1e-1

    directions = ("causal", "bidirectional")
    examples = (
        {},
        {"state_size": 12, "num_blocks": 3, "activation": "half_glu2", "dt_min": 0.05, "dt_max": 0.5},
        {"state_size": 2, "num_blocks": 1, "activation": "none"},
        {"state_size": 8, "num_blocks": 2, "bidirectional": True},
    )
    presets: ClassVar[Mapping[str, Preset] | None] = {
        "s5": lambda size: {
            "pattern": [["mixer"]],
            "norm": "layer",
            "mixer_options": {"state_size": size.hidden_size, "num_blocks": 8},
        }
    }
    marks: ClassVar[Mapping[str, Mark]] = dict.fromkeys(("log_rate", "frequency", "log_step", "in_weight"), SLOW)

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        options, D = self.options, config.hidden_size
        require_divides("mixer 's5'", 2 * options.num_blocks, options.state_size, "2 num_blocks", "state_size")
        if options.activation not in ACTIVATIONS:
            expected = ", ".join(ACTIVATIONS)
            raise ValueError(f"mixer 's5': activation is {options.activation!r}, expected one of {expected}")
        if not 0 < options.dt_min <= options.dt_max:
            got = f"dt_min is {options.dt_min} and dt_max is {options.dt_max}"
            raise ValueError(f"mixer 's5': {got}, expected 0 < dt_min <= dt_max")
        P = options.state_size // 2
        self.log_rate = nn.Parameter(torch.empty(P))  # log(-Re Lambda - 1e-4)
        self.frequency = nn.Parameter(torch.empty(P))  # Im Lambda
        self.log_step = nn.Parameter(torch.empty(P))
        self.in_weight = nn.Parameter(torch.empty(P, D, 2))  # B
        self.out_weight = nn.Parameter(torch.empty(D, P * (2 if config.bidirectional else 1), 2))  # C
        self.skip = nn.Parameter(torch.empty(D))
        self.gate_proj = TokenLinear(D, D) if options.activation != "none" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Lambda from HiPPO-N, B and C drawn for its real form and rotated into the basis of eigenvectors."""
        blocks, std = self.options.num_blocks, self.options.state_size**-0.5  # the source's fan-in of B and of C
        eigenvalue_P, vector_NP = hippo(self.options.state_size // blocks)
        init.copy_(self.log_rate, (-eigenvalue_P.real - SLOWEST).log().repeat(blocks))
        init.copy_(self.frequency, eigenvalue_P.imag.repeat(blocks))
        init.uniform_(self.log_step, math.log(self.options.dt_min), math.log(self.options.dt_max))
        D, sides = self.config.hidden_size, 2 if self.config.bidirectional else 1
        B_JND = std * torch.randn(blocks, vector_NP.shape[0], D, dtype=torch.float64, device="cpu")
        C_DJNZ = std * torch.randn(D, sides * blocks, vector_NP.shape[0], 2, dtype=torch.float64, device="cpu")
        init.copy_(self.in_weight, torch.view_as_real((vector_NP.mH @ B_JND.to(vector_NP.dtype)).flatten(0, 1)))
        init.copy_(self.out_weight, torch.view_as_real((torch.view_as_complex(C_DJNZ) @ vector_NP).flatten(1)))
        init.normal_(self.skip)

    def init_state(self, like_BTD: Tensor) -> ComplexState:
        return ComplexState.empty(like_BTD, self.options.state_size // 2)

    def discretised(self) -> tuple[Tensor, Tensor, Tensor]:
        """log |a| and arg a (P,), in float64: a - 1 and thousands of turns keep their digits; and E (P, D, Z)."""
        wide = wide_dtype(self.log_rate.device)
        log_rate_P, frequency_P, log_step_P = (p.to(wide) for p in (self.log_rate, self.frequency, self.log_step))
        rate_P, step_P = SLOWEST + log_rate_P.exp(), log_step_P.exp()
        log_r_P, theta_P = -rate_P * step_P, frequency_P * step_P
        change_PZ = log_r_P.exp()[:, None] * unit_circle(theta_P) - theta_P.new_tensor([1.0, 0.0])
        inverse_PZ = torch.stack([-rate_P, -frequency_P], dim=-1) / (rate_P**2 + frequency_P**2)[:, None]
        gain_PZ = complex_product(change_PZ, inverse_PZ).to(self.in_weight.dtype)
        return log_r_P, theta_P, complex_product(gain_PZ[:, None], self.in_weight)

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        dtype = compute_dtype(x_BTD)
        log_r_P, theta_P, in_PDZ = self.discretised()
        b_BTPZ = torch.einsum("btd,pdz->btpz", x_BTD.to(dtype), in_PDZ.to(dtype)).to(dtype)
        h_BTPZ, after = complex_scan(b_BTPZ, log_r_P, theta_P, state=state, tokens=tokens)
        if self.config.bidirectional:
            back_BTPZ, _ = complex_scan(b_BTPZ, log_r_P, theta_P, reverse=True, tokens=tokens)
            h_BTPZ, after = torch.cat([h_BTPZ, back_BTPZ], dim=2), None
        # Re(c h) = Re c Re h - Im c Im h.
        conjugate_DPZ = self.out_weight * self.out_weight.new_tensor([1.0, -1.0])
        real_BTD = torch.einsum("btpz,dpz->btd", h_BTPZ.to(x_BTD.dtype), conjugate_DPZ).to(x_BTD.dtype)
        return tokens.zero_padding(self._activate(2 * real_BTD + self.skip * x_BTD)), after

    def _activate(self, y_BTD: Tensor) -> Tensor:
        if self.gate_proj is None:
            return y_BTD
        a_BTD = F.gelu(y_BTD, approximate="tanh")  # as the source does
        gate_BTD = torch.sigmoid(self.gate_proj(a_BTD).to(y_BTD.dtype))
        return gate_BTD * (a_BTD if self.options.activation == "half_glu1" else y_BTD)


def hippo(size: int) -> tuple[Tensor, Tensor]:
    """Eigenvalues of HiPPO-N (N/2,) with their eigenvectors (N, N/2), one of each conjugate pair; complex128.

    A_nk = -sqrt((2n+1)(2k+1)) below the diagonal and -(n+1) on it, plus p p^T with p_n = sqrt(n + 1/2): -1/2 on the
    diagonal, and skew-symmetric beside it. The eigenvalues are -1/2 + i w, where the w are those of a Hermitian matrix.
    """
    n = torch.arange(size, dtype=torch.float64, device="cpu")
    root = (n + 0.5).sqrt()
    pairs_NN = root[:, None] * root
    skew_NN = pairs_NN.triu(1) - pairs_NN.tril(-1)
    frequency_N, vector_NN = torch.linalg.eigh(-1j * skew_NN)
    half = size // 2
    return torch.complex(torch.full_like(frequency_N[:half], -0.5), frequency_N[:half]), vector_NN[:, :half]
