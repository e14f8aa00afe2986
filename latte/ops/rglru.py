"""The real-gated linear recurrent unit of Griffin (De et al., 2024), between its projections.

    r_t = sigmoid(g_t + b_a)    i_t = sigmoid(h_t + b_x)    log a_t = -rate . r_t
    y_t = a_t . y_{t-1} + sqrt(1 - a_t^2) . (i_t . x_t)

with a factor 1 instead of the square root on a document's first token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latte.ops import native
from latte.ops.numbers import compute_dtype
from latte.ops.registry import Draw, Example, operation
from latte.ops.scan import ScanState, diagonal_scan
from latte.shapes import Axes
from latte.state import State, require_state
from latte.tokens import Tokens, require_tokens


def rglru_reference(
    x_BTHW: Tensor, gates_GBTHW: Tensor, bias_GHW: Tensor, rate_HW: Tensor, state: ScanState, tokens: Tokens
) -> tuple[Tensor, ScanState]:
    """The gates as written, and the recurrence token by token."""
    return _gated_scan(x_BTHW, gates_GBTHW, bias_GHW, rate_HW, state, tokens, "reference")


def rglru_chunked(
    x_BTHW: Tensor, gates_GBTHW: Tensor, bias_GHW: Tensor, rate_HW: Tensor, state: ScanState, tokens: Tokens
) -> tuple[Tensor, ScanState]:
    """The same gates, and a scan by doubling."""
    return _gated_scan(x_BTHW, gates_GBTHW, bias_GHW, rate_HW, state, tokens, "torch")


def _gated_scan(
    x_BTHW: Tensor,
    gates_GBTHW: Tensor,
    bias_GHW: Tensor,
    rate_HW: Tensor,
    state: ScanState,
    tokens: Tokens,
    backend: str,
) -> tuple[Tensor, ScanState]:
    recurrence, entry = torch.sigmoid(gates_GBTHW + bias_GHW[:, None, None]).flatten(-2)
    log_a_BTD = -rate_HW.flatten() * recurrence
    # 1 - a^2 by expm1: near a = 1, 1 - e^x would lose all its digits.
    scale_BTD = _bounded_sqrt(-torch.expm1(2 * log_a_BTD))
    scale_BTD = torch.where((tokens.place_BT == 0)[..., None], torch.ones_like(scale_BTD), scale_BTD)
    entered_BTD = scale_BTD * entry * x_BTHW.flatten(-2)
    h_BTD, after = diagonal_scan(log_a_BTD, entered_BTD, state=state, tokens=tokens, backend=backend)
    return h_BTD.view_as(x_BTHW), after


def _bounded_sqrt(x: Tensor) -> Tensor:
    """sqrt with its derivative bounded by 1000: near a = 1 the true one would drown every other gradient."""
    least = 0.25e-6  # where the derivative is 1000
    linear = (x - x.detach()) * 1e3 + x.detach().sqrt()
    return torch.where(x > least, x.clamp(min=least).sqrt(), linear)


def _native(
    x_BTHW: Tensor, gates_GBTHW: Tensor, bias_GHW: Tensor, rate_HW: Tensor, state: ScanState, tokens: Tokens
) -> tuple[Tensor, ScanState]:
    flags = (tokens.start_B, tokens.mask, tokens.reset)
    h_BTHW, h_BD, _ = native.rglru(gates_GBTHW, x_BTHW, bias_GHW, rate_HW, state.h_BD, *flags)
    return h_BTHW, ScanState(h_BD)


def _example(draw: Draw) -> Example:
    B, T, H, W = draw.B, draw.T, 4, 6
    shapes = ((B, T, H, W), (2, B, T, H, W), (2, H, W))
    x, gates, bias = (draw.normal(*shape) for shape in shapes)
    return (x, gates, bias, draw.normal(H, W).abs()), {}


@operation(reference=rglru_reference, chunked=rglru_chunked, native=_native, example=_example)
def rglru(
    x_BTHW: Tensor,
    gates_GBTHW: Tensor,
    bias_GHW: Tensor,
    rate_HW: Tensor,
    *,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """The recurrence above over H blocks of W channels.

    Shapes: x (B, T, H, W); gates before their sigmoid (2, B, T, H, W), that of the recurrence first; bias (2, H, W);
    rate (H, W), at least 0. Computed in float32 or better. Returns h (B, T, H, W) and the :class:`ScanState`.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, or a state of something else.
    """
    dtype = compute_dtype(x_BTHW)
    x, gates, bias, rate = (t.to(dtype) for t in (x_BTHW, gates_GBTHW, bias_GHW, rate_HW))
    axes = Axes("rglru")
    axes.bind("x", x, "BTHW")
    axes.bind("gates", gates, "GBTHW")
    axes.bind("bias", bias, "GHW")
    sizes = axes.bind("rate", rate, "HW")
    tokens = require_tokens("rglru", tokens, x, state)
    before = require_state("rglru", state, ScanState.empty(x, sizes["H"] * sizes["W"]))
    return x, gates, bias, rate, before, tokens
