"""What feeds the latents (equations 18 and 19): y_t = x_t, a short convolution of x, or a gated recurrence over it.

Convolution and recurrence tell the latents about order, so no positional encoding is needed with them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init  # leaves weights alone that were loaded from a file

from latte.ops import ConvState, ScanState, causal_conv, diagonal_scan, native
from latte.ops.backends import choose_backend
from latte.ops.tokens import positions
from latte.shapes import require_divides
from latte.state import State, require_state, state

#: The recurrence gate's strength: log a = -GATE_POWER * softplus(Lambda) * r.
GATE_POWER = 8.0


class Feed(nn.Module):
    """y = x; also the interface of the others."""

    def forward(
        self, x_BTD: Tensor, state: State | None, mask: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, State | None]:
        return x_BTD, None

    def fused_step(
        self, x_BD: Tensor, state: State | None, mask_B: Tensor | None, reset_B: Tensor | None
    ) -> tuple[Tensor, State | None]:
        """One token without gradients, of a state that was checked; in one kernel where there is one."""
        flags = (None if flag is None else flag[:, None] for flag in (mask_B, reset_B))
        y_B1D, after = self(x_BD[:, None], state, *flags)
        return y_B1D[:, 0], after

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

    def forward(
        self, x_BTD: Tensor, state: State | None, mask: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, State | None]:
        return causal_conv(x_BTD, self.weight, state=state, mask=mask, reset=reset)

    def fused_step(
        self, x_BD: Tensor, state: State | None, mask_B: Tensor | None, reset_B: Tensor | None
    ) -> tuple[Tensor, State | None]:
        if mask_B is not None or reset_B is not None or not isinstance(state, ConvState):
            return super().fused_step(x_BD, state, mask_B, reset_B)
        seen_BKD = torch.cat([state.tail_BKD, x_BD[:, None]], dim=1)
        return (seen_BKD * self.weight.T).sum(dim=1), ConvState(seen_BKD[:, 1:])

    def init_state(self, like_BTD: Tensor) -> State:
        return ConvState.empty(like_BTD, self.size, self.weight.shape[0])


@state
class RGLRUState(State):
    """The recurrence's value, and how many tokens of the document it has read: the first is not scaled down."""

    scan: ScanState
    count_B: Tensor


class RGLRU(Feed):
    """The real-gated linear recurrent unit of Griffin (De et al., 2024).

        r_t = sigmoid(W_a x_t + b_a)    i_t = sigmoid(W_x x_t + b_x)    log a_t = -8 softplus(Lambda) r_t
        h_t = a_t . h_{t-1} + sqrt(1 - a_t^2) . (i_t . x_t)

    with block-diagonal W, and a factor 1 instead of the square root on a document's first token. ``radius`` says what
    starts in [0.9, 0.999]: ``"base"`` a = e^{-softplus(Lambda)} itself (released code), ``"power"`` a^8 (paper).
    """

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

    def forward(
        self, x_BTD: Tensor, state: State | None, mask: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, State | None]:
        before = require_state("RG-LRU", state, self.init_state(x_BTD))
        x = x_BTD.to(before.scan.h_BD.dtype)
        blocks = x.unflatten(-1, self.gate_bias.shape[1:])
        gates = torch.einsum("bthi,ghij->gbthj", blocks, self.gate_weight.to(x.dtype)).to(x.dtype)
        if choose_backend("rglru", None, x) == "native":
            rate = (GATE_POWER * F.softplus(self.decay.to(x.dtype))).view(self.gate_bias.shape[1:])
            h_BTHW, h_BD, count_B = native.rglru(
                gates.to(x.dtype),
                blocks,
                self.gate_bias.to(x.dtype),
                rate,
                before.scan.h_BD,
                before.count_B,
                mask,
                reset,
            )
            return h_BTHW.flatten(2).to(x_BTD.dtype), RGLRUState(ScanState(h_BD), count_B)
        recurrence, entry = torch.sigmoid(gates + self.gate_bias.to(x.dtype)[:, None, None]).flatten(-2)
        log_a_BTD = -GATE_POWER * F.softplus(self.decay.to(x.dtype)) * recurrence
        place_BT, count_B = positions(x, mask, reset, before.count_B)
        # 1 - a^2 by expm1: near a = 1, 1 - e^x would lose all its digits.
        scale_BTD = _BoundedSqrt.apply(-torch.expm1(2 * log_a_BTD))
        scale_BTD = torch.where((place_BT == 0)[..., None], torch.ones_like(scale_BTD), scale_BTD)
        h_BTD, scan = diagonal_scan(log_a_BTD, scale_BTD * entry * x, state=before.scan, mask=mask, reset=reset)
        return h_BTD.to(x_BTD.dtype), RGLRUState(scan, count_B)

    def fused_step(
        self, x_BD: Tensor, state: State | None, mask_B: Tensor | None, reset_B: Tensor | None
    ) -> tuple[Tensor, State | None]:
        assert isinstance(state, RGLRUState)
        weights = (self.gate_weight, self.gate_bias, self.decay)
        y_BD, h_BD, count_B = native.rglru_step(
            x_BD, *weights, GATE_POWER, state.scan.h_BD, state.count_B, mask_B, reset_B
        )
        return y_BD, RGLRUState(ScanState(h_BD), count_B)

    def init_state(self, like_BTD: Tensor) -> RGLRUState:
        count_B = torch.zeros(like_BTD.shape[0], dtype=torch.long, device=like_BTD.device)
        return RGLRUState(ScanState.empty(like_BTD, self.width), count_B)


class _BoundedSqrt(torch.autograd.Function):
    """sqrt with its derivative bounded by 1000: near a = 1 the true one would drown every other gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient / (2 * x.sqrt()).clamp(min=1e-3)


class BothWays(Feed):
    """One feed per direction, on half of the channels each, side by side."""

    def __init__(self, forwards: Feed, backwards: Feed) -> None:
        super().__init__()
        self.forwards, self.backwards = forwards, backwards

    def forward(
        self, x_BTD: Tensor, state: State | None, mask: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, State | None]:
        ahead, back = x_BTD.chunk(2, dim=-1)
        ahead, _ = self.forwards(ahead, None, mask, reset)
        mask = None if mask is None else mask.flip(1)
        # Read backwards, a document begins at its last token: the one before the next document's first.
        reset = None if reset is None else F.pad(reset[:, 1:], (0, 1)).flip(1)
        back, _ = self.backwards(back.flip(1), None, mask, reset)
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
