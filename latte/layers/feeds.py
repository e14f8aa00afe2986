"""What feeds the latents (equations 18 and 19): y_t = x_t, a short convolution of x, or a gated recurrence over it.

Convolution and recurrence tell the latents about order, so no positional encoding is needed with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.layers.marks import Mark, Marked
from latte.ops import ConvState, ScanState, causal_conv, rglru
from latte.ops.numbers import compute_dtype
from latte.shapes import require_divides
from latte.state import State
from latte.tokens import Tokens

#: The recurrence gate's strength: log a = -GATE_POWER * softplus(Lambda) * r.
GATE_POWER = 8.0


class Feed(Marked):
    """y = x; also the interface of the others."""

    def forward(self, x_BTD: Tensor, state: State | None, tokens: Tokens) -> tuple[Tensor, State | None]:
        return x_BTD, None

    def reset_parameters(self) -> None:
        """Draw the parameters anew."""

    def init_state(self, like_BTD: Tensor) -> State | None:
        return None


class ConvFeed(Feed):
    """Causal depthwise convolution, equation (18)."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"conv_size is {size}, expected at least 1")
        self.size = size
        self.weight = nn.Parameter(torch.empty(width, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.normal_(self.weight, std=1 / math.sqrt(self.size))

    def forward(self, x_BTD: Tensor, state: State | None, tokens: Tokens) -> tuple[Tensor, State | None]:
        return causal_conv(x_BTD, self.weight, state=state, tokens=tokens)

    def init_state(self, like_BTD: Tensor) -> State:
        return ConvState.empty(like_BTD, self.size, self.weight.shape[0])


class RGLRU(Feed):
    """The real-gated linear recurrent unit of Griffin (De et al., 2024).

        r_t = sigmoid(W_a x_t + b_a)    i_t = sigmoid(W_x x_t + b_x)    log a_t = -8 softplus(Lambda) r_t
        h_t = a_t . h_{t-1} + sqrt(1 - a_t^2) . (i_t . x_t)

    with block-diagonal W, and a factor 1 instead of the square root on a document's first token. ``radius`` says what
    starts in [0.9, 0.999]: ``"base"`` a = e^{-softplus(Lambda)} itself (released code), ``"power"`` a^8 (paper).
    """

    marks: ClassVar[Mapping[str, Mark]] = {"gate_bias": Mark(decay=False), "decay": Mark(decay=False, float32=True)}

    def __init__(self, width: int, blocks: int, radius: str = "base") -> None:
        super().__init__()
        require_divides("RG-LRU", blocks, width, "blocks", "width")
        block = width // blocks
        self.width, self.radius = width, radius
        self.gate_weight = nn.Parameter(torch.empty(2, blocks, block, block))  # recurrence gate, input gate
        self.gate_bias = nn.Parameter(torch.empty(2, blocks, block))
        self.decay = nn.Parameter(torch.empty(width))  # Lambda
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init.normal_(self.gate_weight, std=1 / math.sqrt(self.gate_weight.shape[-1]))
        init.zeros_(self.gate_bias)
        # Uniform on the ring 0.9 < |a| < 0.999, then Lambda = softplus^-1(-log a).
        log_a = torch.empty_like(self.decay, requires_grad=False).uniform_(0.9**2, 0.999**2).log() / 2
        if self.radius == "power":
            log_a = log_a / GATE_POWER
        init.copy_(self.decay, (-log_a).expm1().log())

    def forward(self, x_BTD: Tensor, state: State | None, tokens: Tokens) -> tuple[Tensor, State | None]:
        blocks = x_BTD.to(compute_dtype(x_BTD)).unflatten(-1, self.gate_bias.shape[1:])
        gates = torch.einsum("bthi,ghij->gbthj", blocks, self.gate_weight.to(blocks.dtype))
        rate = (GATE_POWER * F.softplus(self.decay)).view(self.gate_bias.shape[1:])
        h_BTHW, after = rglru(blocks, gates, self.gate_bias, rate, state=state, tokens=tokens)
        return h_BTHW.flatten(2).to(x_BTD.dtype), after

    def init_state(self, like_BTD: Tensor) -> ScanState:
        return ScanState.empty(like_BTD, self.width)


class BothWays(Feed):
    """One feed per direction, on half of the channels each, side by side."""

    def __init__(self, forwards: Feed, backwards: Feed) -> None:
        super().__init__()
        self.forwards, self.backwards = forwards, backwards

    def forward(self, x_BTD: Tensor, state: State | None, tokens: Tokens) -> tuple[Tensor, State | None]:
        ahead, back = x_BTD.chunk(2, dim=-1)
        ahead, _ = self.forwards(ahead, None, tokens)
        back, _ = self.backwards(back.flip(1), None, tokens.reversed)
        return torch.cat([ahead, back.flip(1)], dim=-1), None


def build_feed(
    kind: str, width: int, *, blocks: int, conv_size: int = 3, radius: str = "base", bidirectional: bool = False
) -> Feed:
    """The feed called ``kind``: ``"x"``, ``"conv"`` or ``"rglru"``."""
    if kind == "x":
        return Feed()
    if bidirectional:
        require_divides(f"bidirectional feed {kind!r}", 2, width, "directions", "width")
        halves = [_one_way(kind, width // 2, blocks, conv_size, radius) for _ in range(2)]
        return BothWays(*halves)
    return _one_way(kind, width, blocks, conv_size, radius)


def _one_way(kind: str, width: int, blocks: int, conv_size: int, radius: str) -> Feed:
    return ConvFeed(width, conv_size) if kind == "conv" else RGLRU(width, blocks, radius)
