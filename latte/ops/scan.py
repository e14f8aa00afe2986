"""Elementwise recurrences over tokens: the diagonal scan, and the causal depthwise convolution."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops import native
from latte.ops.gated import pad_tokens
from latte.ops.numbers import EMPTY, compute_dtype
from latte.ops.registry import Draw, Example, operation
from latte.shapes import Axes
from latte.state import State, require_state, state
from latte.tokens import Tokens, require_tokens, take_tokens

# Tokens that are scanned by doubling; longer rows are cut into runs of this many.
RUN = 64


@state
class ScanState(State):
    """The last value of the recurrence."""

    h_BD: Tensor

    @classmethod
    def empty(cls, like_BT: Tensor, width: int) -> ScanState:
        return cls(torch.zeros(like_BT.shape[0], width, dtype=compute_dtype(like_BT), device=like_BT.device))


def diagonal_scan_reference(
    log_a_BTD: Tensor, b_BTD: Tensor, reverse: bool, state: ScanState, tokens: Tokens
) -> tuple[Tensor, ScanState]:
    """The recurrence as written, token by token."""
    log_a, b, tokens = _prepare(log_a_BTD, b_BTD, reverse, tokens)
    h_BD = state.h_BD
    outputs = []
    for t in range(b.shape[1]):
        if tokens.reset is not None:
            h_BD = torch.where(tokens.reset[:, t, None], 0.0, h_BD)
        h_BD = log_a[:, t].exp() * h_BD + b[:, t]
        outputs.append(h_BD)
    return _finish(torch.stack(outputs, dim=1), b_BTD, reverse, tokens), ScanState(h_BD)


def diagonal_scan_chunked(
    log_a_BTD: Tensor, b_BTD: Tensor, reverse: bool, state: ScanState, tokens: Tokens
) -> tuple[Tensor, ScanState]:
    """Doubling within runs of tokens, the same scan over the runs' ends, then both together."""
    log_a, b, tokens = _prepare(log_a_BTD, b_BTD, reverse, tokens)
    if tokens.reset is not None:
        log_a = torch.where(tokens.reset[..., None], EMPTY, log_a)
    h_BTD = _scan(log_a, b, state.h_BD)
    return _finish(h_BTD, b_BTD, reverse, tokens), ScanState(h_BTD[:, -1].clone())


def _prepare(log_a: Tensor, b: Tensor, reverse: bool, tokens: Tokens) -> tuple[Tensor, Tensor, Tokens]:
    """Working dtype, reading order from left to right, and padding that changes nothing."""
    log_a, b = log_a.to(compute_dtype(b)), b.to(compute_dtype(b))
    if reverse:
        log_a, b, tokens = log_a.flip(1), b.flip(1), tokens.reversed
    return tokens.fill_padding(log_a, 0.0), tokens.fill_padding(b, 0.0), tokens


def _finish(h_BTD: Tensor, like_BTD: Tensor, reverse: bool, tokens: Tokens) -> Tensor:
    h_BTD = tokens.zero_padding(h_BTD).to(like_BTD.dtype)
    return h_BTD.flip(1) if reverse else h_BTD


def _native(
    log_a_BTD: Tensor, b_BTD: Tensor, reverse: bool, state: ScanState, tokens: Tokens
) -> tuple[Tensor, ScanState]:
    h_BTD, h_BD = native.diagonal_scan(log_a_BTD, b_BTD, state.h_BD, tokens.mask, tokens.reset, reverse)
    return h_BTD, ScanState(h_BD)


def _scan_example(draw: Draw) -> Example:
    return (-draw.normal(draw.B, draw.T, 16).abs(), draw.normal(draw.B, draw.T, 16)), {}


@operation(
    reference=diagonal_scan_reference,
    chunked=diagonal_scan_chunked,
    step=diagonal_scan_reference,
    native=_native,
    example=_scan_example,
)
def diagonal_scan(
    log_a_BTD: Tensor,
    b_BTD: Tensor,
    *,
    reverse: bool = False,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """h_t = e^{log a_t} . h_{t-1} + b_t, elementwise; the recurrence of the RG-LRU and its kin.

    Shapes: log_a (at most 0) and b (B, T, D). With ``reverse`` it runs from the last token to the first,
    h_t = e^{log a_t} . h_{t+1} + b_t, within the same documents, and the state enters at the right. Returns h
    (B, T, D), 0 at padding, and the :class:`ScanState` after these tokens.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, or a state of something else.
    """
    axes = Axes("diagonal_scan")
    axes.bind("log_a", log_a_BTD, "BTD")
    sizes = axes.bind("b", b_BTD, "BTD")
    tokens = require_tokens("diagonal_scan", tokens, b_BTD, state)
    before = require_state("diagonal_scan", state, ScanState.empty(b_BTD, sizes["D"]))
    return log_a_BTD, b_BTD, reverse, before, tokens


def _scan(log_a_BTD: Tensor, b_BTD: Tensor, h_BD: Tensor) -> Tensor:
    T = b_BTD.shape[1]
    if T <= RUN:
        log_a, h = _double(log_a_BTD, b_BTD)
        return h + log_a.exp() * h_BD[:, None]
    extra = -T % RUN
    runs = [pad_tokens(x, extra).unflatten(1, (-1, RUN)) for x in (log_a_BTD, b_BTD)]
    log_a_BNCD, h_BNCD = _double(*runs)
    ends_BND = _scan(log_a_BNCD[:, :, -1], h_BNCD[:, :, -1], h_BD)
    before_BND = torch.cat([h_BD[:, None], ends_BND[:, :-1]], dim=1)
    return (h_BNCD + log_a_BNCD.exp() * before_BND[:, :, None]).flatten(1, 2)[:, :T]


def _double(log_a_CD: Tensor, h_CD: Tensor) -> tuple[Tensor, Tensor]:
    """The scan from a zero state and the cumulative log gate, over the axis before the last."""
    distance = 1
    while distance < h_CD.shape[-2]:
        shift = (0, 0, distance, 0)
        h_CD = h_CD + log_a_CD.exp() * F.pad(h_CD[..., :-distance, :], shift)
        log_a_CD = log_a_CD + F.pad(log_a_CD[..., :-distance, :], shift)
        distance *= 2
    return log_a_CD, h_CD


@state
class ConvState(State):
    """The last inputs that later outputs still look at (zeros where there were none)."""

    tail_BKD: Tensor

    @classmethod
    def empty(cls, like_BT: Tensor, size: int, width: int) -> ConvState:
        return cls(like_BT.new_zeros(like_BT.shape[0], size - 1, width))


def causal_conv_reference(
    x_BTD: Tensor, weight_DK: Tensor, bias_D: Tensor | None, state: ConvState, tokens: Tokens
) -> tuple[Tensor, ConvState]:
    """Equation (18) token by token: drop the tail at a document's start, append, weigh."""
    tail_BKD = state.tail_BKD
    outputs = []
    for t in range(x_BTD.shape[1]):
        if tokens.reset is not None:
            tail_BKD = torch.where(tokens.reset[:, t, None, None], 0.0, tail_BKD)
        seen_BKD = torch.cat([tail_BKD, x_BTD[:, t, None]], dim=1)
        y_BD = (seen_BKD * weight_DK.T).sum(1)
        outputs.append(y_BD if bias_D is None else y_BD + bias_D)
        moved_BKD = seen_BKD[:, 1:]
        tail_BKD = moved_BKD if tokens.mask is None else torch.where(tokens.mask[:, t, None, None], moved_BKD, tail_BKD)
    return tokens.zero_padding(torch.stack(outputs, dim=1)), ConvState(tail_BKD)


def causal_conv_shifted(
    x_BTD: Tensor, weight_DK: Tensor, bias_D: Tensor | None, state: ConvState, tokens: Tokens
) -> tuple[Tensor, ConvState]:
    """One multiply-add of the whole row, shifted, per tap."""
    T, K = x_BTD.shape[1], weight_DK.shape[1]
    moved = tokens.compact
    x = x_BTD if moved is None else moved.gather(x_BTD)
    padded_BSD = torch.cat([state.tail_BKD, x], dim=1)
    y_BTD = x * weight_DK[:, -1]
    reach_BT = None
    if tokens.reset is not None:
        # Behind a document's first token there is nothing; a row that continues a state has its tail.
        reach_BT = torch.where(tokens.segment_BT == 0, K, tokens.in_row_BT - 1)
        reach_BT = reach_BT if moved is None else moved.gather(reach_BT)
    for back in range(1, K):
        earlier = padded_BSD[:, K - 1 - back : K - 1 - back + T] * weight_DK[:, K - 1 - back]
        if reach_BT is not None:
            earlier = torch.where((reach_BT >= back)[..., None], earlier, 0.0)
        y_BTD = y_BTD + earlier
    if bias_D is not None:
        y_BTD = y_BTD + bias_D
    if moved is not None:
        y_BTD = moved.scatter(y_BTD)
    return tokens.zero_padding(y_BTD), _conv_tail(padded_BSD, K, tokens)


def _conv_tail(padded_BSD: Tensor, K: int, tokens: Tokens) -> ConvState:
    """The K - 1 inputs before the next token; those before its document's start are zeros."""
    if tokens.plain:
        return ConvState(padded_BSD[:, padded_BSD.shape[1] - (K - 1) :].clone())
    device = padded_BSD.device
    tail_BKD = take_tokens(padded_BSD, tokens.read_B[:, None] + torch.arange(K - 1, device=device))
    if tokens.reset is not None:
        # Slot i of the tail is K - 1 - i tokens back.
        inside_BK = torch.arange(K - 1, 0, -1, device=device) <= tokens.in_row_BT[:, -1:]
        tail_BKD = torch.where((inside_BK | ~tokens.reset.any(1, keepdim=True))[..., None], tail_BKD, 0.0)
    return ConvState(tail_BKD)


def _native_conv(
    x_BTD: Tensor, weight_DK: Tensor, bias_D: Tensor | None, state: ConvState, tokens: Tokens
) -> tuple[Tensor, ConvState]:
    if weight_DK.dtype != x_BTD.dtype:
        return causal_conv_shifted(x_BTD, weight_DK, bias_D, state, tokens)
    y_BTD, tail_BKD = native.causal_conv(x_BTD, weight_DK, bias_D, state.tail_BKD, tokens.mask, tokens.reset)
    return y_BTD, ConvState(tail_BKD)


def _conv_example(draw: Draw) -> Example:
    return (draw.normal(draw.B, draw.T, 16), draw.normal(16, 4), draw.normal(16)), {}


@operation(
    reference=causal_conv_reference,
    chunked=causal_conv_shifted,
    step=causal_conv_reference,
    native=_native_conv,
    example=_conv_example,
)
def causal_conv(
    x_BTD: Tensor,
    weight_DK: Tensor,
    bias_D: Tensor | None = None,
    *,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """Causal depthwise convolution, equation (18): y_t = sum_{i<K} w_i . x_{t-i}, within each document.

    Shapes: x (B, T, D), weight (D, K) with the present token's tap last, bias (D,). The sum runs over the K latest
    *real* tokens. Returns y (B, T, D), 0 at padding, and the :class:`ConvState` after these tokens.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, or a state of something else.
    """
    axes = Axes("causal_conv")
    axes.bind("x", x_BTD, "BTD")
    sizes = axes.bind("weight", weight_DK, "DK")
    if bias_D is not None:
        axes.bind("bias", bias_D, "D")
    tokens = require_tokens("causal_conv", tokens, x_BTD, state)
    before = require_state("causal_conv", state, ConvState.empty(x_BTD, sizes["K"], sizes["D"]))
    return x_BTD, weight_DK, bias_D, before, tokens
