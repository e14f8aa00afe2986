"""The selective scan of Mamba (Gu and Dao, 2023): every channel has a diagonal state with a time step of its own.

    h_t[d,p] = e^{Delta_t[d] A[d,p]} h_{t-1}[d,p] + Delta_t[d] B_t[p] x_t[d]        y_t[d] = sum_p C_t[p] h_t[d,p]

The gate depends on both axes of the state, so there is no form in matrix products: it is a diagonal scan over D P
channels. Written out for a whole row these would be P times its activations, hence blocks of tokens; the kernel never
writes them out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latte.ops import native
from latte.ops.numbers import EMPTY, compute_dtype
from latte.ops.recompute import recomputed
from latte.ops.registry import Draw, Example, operation
from latte.ops.scan import ScanState, diagonal_scan
from latte.shapes import Axes
from latte.state import State, require_state, state
from latte.tokens import Tokens, require_tokens

# Tokens whose states are written out at a time.
BLOCK = 64


@state
class SelectiveState(State):
    """The state of every channel."""

    h_BDP: Tensor

    @classmethod
    def empty(cls, like_BT: Tensor, width: int, size: int) -> SelectiveState:
        shape = (like_BT.shape[0], width, size)
        return cls(torch.zeros(shape, dtype=compute_dtype(like_BT), device=like_BT.device))


def selective_scan_reference(
    x_BTD: Tensor, delta_BTD: Tensor, A_DP: Tensor, B_BTP: Tensor, C_BTP: Tensor, state: SelectiveState, tokens: Tokens
) -> tuple[Tensor, SelectiveState]:
    """The recurrence as written, token by token."""
    x, delta, A, B, C = _prepare(x_BTD, delta_BTD, A_DP, B_BTP, C_BTP, tokens)
    h_BDP = state.h_BDP
    outputs = []
    for t in range(x.shape[1]):
        if tokens.reset is not None:
            h_BDP = torch.where(tokens.reset[:, t, None, None], 0.0, h_BDP)
        entered_BDP = (delta[:, t] * x[:, t])[..., None] * B[:, t, None]
        h_BDP = _log_gate(delta[:, t], A).exp() * h_BDP + entered_BDP
        outputs.append((h_BDP @ C[:, t, :, None])[..., 0])
    return tokens.zero_padding(torch.stack(outputs, dim=1)).to(x_BTD.dtype), SelectiveState(h_BDP)


def selective_scan_chunked(
    x_BTD: Tensor, delta_BTD: Tensor, A_DP: Tensor, B_BTP: Tensor, C_BTP: Tensor, state: SelectiveState, tokens: Tokens
) -> tuple[Tensor, SelectiveState]:
    """Block by block, each a scan by doubling: memory linear in T, and not P times that."""
    x, delta, A, B, C = _prepare(x_BTD, delta_BTD, A_DP, B_BTP, C_BTP, tokens)
    h_BDP, outputs = state.h_BDP, []
    for block, part in enumerate(tokens.parts(BLOCK)):
        here = slice(block * BLOCK, (block + 1) * BLOCK)
        y, h_BDP = recomputed(_block, *(t[:, here] for t in (x, delta, B, C)), A, h_BDP, part)
        outputs.append(y)
    return tokens.zero_padding(torch.cat(outputs, dim=1)).to(x_BTD.dtype), SelectiveState(h_BDP)


def _native(
    x_BTD: Tensor, delta_BTD: Tensor, A_DP: Tensor, B_BTP: Tensor, C_BTP: Tensor, state: SelectiveState, tokens: Tokens
) -> tuple[Tensor, SelectiveState]:
    inputs = (x_BTD, delta_BTD, A_DP, B_BTP, C_BTP)
    y_BTD, h_BDP = native.selective_scan(*inputs, state.h_BDP, tokens.mask, tokens.reset)
    return y_BTD, SelectiveState(h_BDP)


def _block(
    x: Tensor, delta: Tensor, B: Tensor, C: Tensor, A_DP: Tensor, h_BDP: Tensor, tokens: Tokens
) -> tuple[Tensor, Tensor]:
    """Outputs of a block and the state after it."""
    entered_BTDP = (delta * x)[..., None] * B[:, :, None]
    log_gate_BTF, entered_BTF = _log_gate(delta, A_DP).flatten(2), entered_BTDP.flatten(2)
    before = ScanState(h_BDP.flatten(1))
    h_BTF, after = diagonal_scan(log_gate_BTF, entered_BTF, state=before, tokens=tokens)
    y_BTD = (h_BTF.view_as(entered_BTDP) @ C[..., None])[..., 0]
    return y_BTD, after.h_BD.view_as(h_BDP)


def _prepare(
    x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, tokens: Tokens
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Working dtype; padding takes no time, so that it neither fades nor adds."""
    x, delta, A, B, C = (t.to(compute_dtype(x)) for t in (x, delta, A, B, C))
    return x, tokens.fill_padding(delta, 0.0), A, B, C


def _log_gate(delta_D: Tensor, A_DP: Tensor) -> Tensor:
    """Delta A, finite however strongly it forgets."""
    return (delta_D[..., None] * A_DP).clamp(min=EMPTY)


def _example(draw: Draw) -> Example:
    B, T, D, P = draw.B, draw.T, 16, 4
    x, delta, A, B_, C = (draw.normal(*shape) for shape in ((B, T, D), (B, T, D), (D, P), (B, T, P), (B, T, P)))
    return (x, delta.abs(), -A.abs(), B_, C), {}


@operation(
    reference=selective_scan_reference,
    chunked=selective_scan_chunked,
    step=selective_scan_reference,
    native=_native,
    example=_example,
)
def selective_scan(
    x_BTD: Tensor,
    delta_BTD: Tensor,
    A_DP: Tensor,
    B_BTP: Tensor,
    C_BTP: Tensor,
    *,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """The recurrence above for D channels with P states each.

    Shapes: x and the time steps delta, at least 0, (B, T, D); A, at most 0, (D, P); B and C (B, T, P). Returns y
    (B, T, D), 0 at padding, and the :class:`SelectiveState` after these tokens. For gradients each block of tokens is
    computed twice: only the state before it is kept.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, or a state of something else.
    """
    axes = Axes("selective_scan")
    axes.bind("x", x_BTD, "BTD")
    axes.bind("delta", delta_BTD, "BTD")
    axes.bind("A", A_DP, "DP")
    axes.bind("B", B_BTP, "BTP")
    sizes = axes.bind("C", C_BTP, "BTP")
    tokens = require_tokens("selective_scan", tokens, x_BTD, state)
    before = require_state("selective_scan", state, SelectiveState.empty(x_BTD, sizes["D"], sizes["P"]))
    return x_BTD, delta_BTD, A_DP, B_BTP, C_BTP, before, tokens
