"""S4D (Gu et al., 2022): a diagonal state-space model of every channel, then a gated projection."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.config import MixerConfig
from latte.layers.diagonal import SLOW, SLOWEST, zero_order_hold
from latte.layers.linear import TokenLinear
from latte.layers.marks import Mark
from latte.mixers.base import Mixer, Preset
from latte.mixers.registry import register
from latte.mixers.s5 import hippo
from latte.ops import ComplexState, state_space
from latte.ops.numbers import compute_dtype
from latte.state import State
from latte.tokens import Tokens


@register("s4d")
class S4DMixer(Mixer):
    """out = p . sigmoid(g), (p, g) = W gelu(y) + b, with y a diagonal state-space model of every channel of x:

        h_t = a h_{t-1} + (a - 1) / A . x_t    y_t = 2 Re(C . h_t) + d . x_t    a = e^{Delta A}, Delta one a channel

    A starts at -1/2 + i w: w_n = pi n (``lin``), N/pi (N / (2n + 1) - 1) (``inv``), or those of HiPPO (``legs``). If
    bidirectional, the same a runs from the right as well, read by a second C, and both hold the present token.
    Source: arXiv 2206.11893. There the model is a convolution by FFT and its backward kernel begins at the next token;
    here it is the op ``state_space``, exact with padding and documents, whose memory is linear in the length. Re A is
    -1e-4 - e^{log_rate}, so that a state never grows.
    """

    @dataclass(frozen=True)
    class Options:
        state_size: int = 64  # N of each channel, of which half are computed: they come in conjugate pairs
        start: Literal["lin", "inv", "legs"] = "lin"
        dt_min: float = 1e-3  # Delta starts log-uniform in [dt_min, dt_max]
        dt_max: float = 1e-1

    directions = ("causal", "bidirectional")
    examples = (
        {"state_size": 4},
        {"state_size": 2, "start": "inv", "dt_min": 0.05, "dt_max": 0.5},
        {"state_size": 4, "start": "legs", "bidirectional": True},
    )
    presets: ClassVar[Mapping[str, Preset] | None] = {
        "s4d": lambda size: {"pattern": [["mixer"]], "norm": "layer"},
    }
    marks: ClassVar[Mapping[str, Mark]] = {
        **dict.fromkeys(("log_rate", "frequency", "log_step"), SLOW),
        "skip": Mark(decay=False),
    }

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        D, options = config.hidden_size, self.options
        if options.state_size < 2 or options.state_size % 2:
            raise ValueError(f"mixer 's4d': state_size is {options.state_size}, expected an even number, at least 2")
        if not 0 < options.dt_min <= options.dt_max:
            got = f"dt_min is {options.dt_min} and dt_max is {options.dt_max}"
            raise ValueError(f"mixer 's4d': {got}, expected 0 < dt_min <= dt_max")
        N, sides = options.state_size // 2, 2 if config.bidirectional else 1
        self.log_rate, self.frequency = (nn.Parameter(torch.empty(D, N)) for _ in range(2))
        self.log_step, self.skip = (nn.Parameter(torch.empty(D)) for _ in range(2))
        self.out_weight = nn.Parameter(torch.empty(sides, D, N, 2))  # C
        self.out_proj = TokenLinear(D, 2 * D)
        self.out_proj.residual = True  # type: ignore[assignment]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.constant_(self.log_rate, math.log(0.5 - SLOWEST))
        init.copy_(
            self.frequency, start_frequencies(self.options.state_size, self.options.start).expand_as(self.frequency)
        )
        init.uniform_(self.log_step, math.log(self.options.dt_min), math.log(self.options.dt_max))
        init.normal_(self.out_weight, std=0.5**0.5)
        init.normal_(self.skip)

    def init_state(self, like_BTD: Tensor) -> ComplexState:
        return ComplexState.empty(like_BTD, self.frequency.numel())

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        z_BTD, after = x_BTD.to(compute_dtype(x_BTD)), None
        y_BTD = self.skip.to(z_BTD.dtype) * z_BTD
        if not self.config.bidirectional:
            read_BTD, after = state_space(z_BTD, *self._model(0), state=state, tokens=tokens)
            y_BTD = y_BTD + read_BTD
        else:
            empty = self.init_state(x_BTD)
            read_BTD, _ = state_space(z_BTD, *self._model(0), state=empty, tokens=tokens)
            back_BTD, _ = state_space(z_BTD.flip(1), *self._model(1), state=empty, tokens=tokens.reversed)
            y_BTD = y_BTD + read_BTD + back_BTD.flip(1)
        out_BTD = F.glu(self.out_proj(F.gelu(y_BTD.to(x_BTD.dtype))).to(x_BTD.dtype), dim=-1)
        return tokens.zero_padding(out_BTD), after

    def _model(self, side: int) -> tuple[Tensor, Tensor, Tensor]:
        return zero_order_hold(self.log_rate, self.frequency, self.log_step, self.out_weight[side])

    def flops_per_token(self, context: int) -> int:
        return 2 * self.out_proj.weight.numel() + 8 * self.out_weight.numel()


def start_frequencies(size: int, start: str) -> Tensor:
    """Im A (N/2,), in float64."""
    n = torch.arange(size // 2, dtype=torch.float64, device="cpu")
    if start == "lin":
        return math.pi * n
    if start == "inv":
        return size / math.pi * (size / (2 * n + 1) - 1)
    return hippo(size)[0].imag
