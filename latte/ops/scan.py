"""Elementwise recurrences over tokens: the diagonal scan, and the causal depthwise convolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.backends import choose_backend, compute_dtype, exact
from latte.ops.gated import UNSEEN, pad_tokens
from latte.ops.tokens import compact, positions, segment_ids, take_tokens, zero_padding
from latte.shapes import Axes
from latte.state import State, require_state, state

# Tokens that are scanned by doubling; longer rows are cut into runs of this many.
RUN = 64


@state
class ScanState(State):
    """The last value of the recurrence."""

    h_BD: Tensor

    @classmethod
    def empty(cls, like_BT: Tensor, width: int) -> ScanState:
        return cls(torch.zeros(like_BT.shape[0], width, dtype=compute_dtype(like_BT), device=like_BT.device))


@exact
def diagonal_scan(
    log_a_BTD: Tensor,
    b_BTD: Tensor,
    *,
    state: State | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    reverse: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, ScanState]:
    """h_t = e^{log a_t} . h_{t-1} + b_t, elementwise; the recurrence of the RG-LRU and its kin.

    Shapes: log_a (at most 0) and b (B, T, D); h (B, T, D), 0 at padding. With ``reverse`` it runs from the last token
    to the first, h_t = e^{log a_t} . h_{t+1} + b_t, within the same documents, and the state enters at the right.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, or a state of something else.
    """
    axes = Axes("diagonal_scan")
    axes.bind("log_a", log_a_BTD, "BTD")
    sizes = axes.bind("b", b_BTD, "BTD")
    axes.flags("mask", mask)
    axes.flags("reset", reset)
    before = require_state("diagonal_scan", state, ScanState.empty(b_BTD, sizes["D"]))
    chosen = choose_backend("diagonal_scan", backend, b_BTD)
    if chosen == "native" and not (backend is None and sizes["T"] == 1):
        from latte.ops import native

        h_BTD, h_BD = native.diagonal_scan(log_a_BTD, b_BTD, before.h_BD, mask, reset, reverse)
        return h_BTD, ScanState(h_BD)
    if reverse:
        log_a_BTD, b_BTD = log_a_BTD.flip(1), b_BTD.flip(1)
        mask = None if mask is None else mask.flip(1)
        # Going left, a document begins behind the token that stands before the next one's first.
        reset = None if reset is None else F.pad(reset[:, 1:], (0, 1)).flip(1)
    stepwise = chosen == "reference" or (backend is None and sizes["T"] == 1)
    h_BTD, after = (diagonal_scan_reference if stepwise else diagonal_scan_chunked)(
        log_a_BTD, b_BTD, before, mask, reset
    )
    return h_BTD.flip(1) if reverse else h_BTD, after


def diagonal_scan_reference(
    log_a_BTD: Tensor, b_BTD: Tensor, state: ScanState, mask: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, ScanState]:
    """The recurrence as written, token by token."""
    h_BD = state.h_BD
    log_a, b = _prepare(log_a_BTD, b_BTD, mask)
    outputs = []
    for t in range(b.shape[1]):
        if reset is not None:
            h_BD = torch.where(reset[:, t, None], 0.0, h_BD)
        h_BD = log_a[:, t].exp() * h_BD + b[:, t]
        outputs.append(h_BD)
    return zero_padding(torch.stack(outputs, dim=1), mask).to(b_BTD.dtype), ScanState(h_BD)


def diagonal_scan_chunked(
    log_a_BTD: Tensor, b_BTD: Tensor, state: ScanState, mask: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, ScanState]:
    """Doubling within runs of tokens, the same scan over the runs' ends, then both together."""
    log_a, b = _prepare(log_a_BTD, b_BTD, mask)
    if reset is not None:
        log_a = torch.where(reset[..., None], UNSEEN, log_a)
    h_BTD = _scan(log_a, b, state.h_BD)
    return zero_padding(h_BTD, mask).to(b_BTD.dtype), ScanState(h_BTD[:, -1])


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


def _prepare(log_a: Tensor, b: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    log_a, b = log_a.to(compute_dtype(b)), b.to(compute_dtype(b))
    if mask is not None:
        log_a, b = torch.where(mask[..., None], log_a, 0.0), torch.where(mask[..., None], b, 0.0)
    return log_a, b


@state
class ConvState(State):
    """The last inputs that later outputs still look at (zeros where there were none)."""

    tail_BKD: Tensor

    @classmethod
    def empty(cls, like_BT: Tensor, size: int, width: int) -> ConvState:
        return cls(like_BT.new_zeros(like_BT.shape[0], size - 1, width))


@exact
def causal_conv(
    x_BTD: Tensor,
    weight_DK: Tensor,
    bias_D: Tensor | None = None,
    *,
    state: State | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, ConvState]:
    """Causal depthwise convolution, equation (18): y_t = sum_{i<K} w_i . x_{t-i}, within each document.

    Shapes: x (B, T, D), weight (D, K) with the present token's tap last, bias (D,); y (B, T, D), 0 at padding.
    The sum runs over the K latest *real* tokens.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, or a state of something else.
    """
    axes = Axes("causal_conv")
    axes.bind("x", x_BTD, "BTD")
    sizes = axes.bind("weight", weight_DK, "DK")
    if bias_D is not None:
        axes.bind("bias", bias_D, "D")
    axes.flags("mask", mask)
    axes.flags("reset", reset)
    T, K = sizes["T"], sizes["K"]
    before = require_state("causal_conv", state, ConvState.empty(x_BTD, K, sizes["D"]))
    if choose_backend("causal_conv", backend, x_BTD) == "reference":
        return causal_conv_reference(x_BTD, weight_DK, bias_D, before, mask, reset)
    start_B = torch.zeros(sizes["B"], dtype=torch.long, device=x_BTD.device)
    place_BT, count_B = positions(x_BTD, mask, reset, start_B)
    moved = None if mask is None else compact(mask)
    segment_BT = segment_ids(reset, x_BTD)
    x = x_BTD
    if moved is not None:
        assert mask is not None
        x, place_BT, segment_BT = moved.gather(x), moved.gather(place_BT), moved.gather(segment_BT)
    padded_BSD = torch.cat([before.tail_BKD, x], dim=1)
    y_BTD = x * weight_DK[:, -1]
    for back in range(1, K):
        earlier = padded_BSD[:, K - 1 - back : K - 1 - back + T] * weight_DK[:, K - 1 - back]
        if reset is not None:
            # Behind a document's first token there is nothing; a row that continues a state has its tail.
            earlier = torch.where(((place_BT >= back) | (segment_BT == 0))[..., None], earlier, 0.0)
        y_BTD = y_BTD + earlier
    if bias_D is not None:
        y_BTD = y_BTD + bias_D
    if moved is not None:
        y_BTD = moved.scatter(y_BTD)
    return zero_padding(y_BTD, mask), _conv_tail(padded_BSD, K, mask, reset, count_B)


def causal_conv_reference(
    x_BTD: Tensor,
    weight_DK: Tensor,
    bias_D: Tensor | None,
    state: ConvState,
    mask: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, ConvState]:
    """Equation (18) token by token: drop the tail at a document's start, append, weigh."""
    tail_BKD = state.tail_BKD
    outputs = []
    for t in range(x_BTD.shape[1]):
        if reset is not None:
            tail_BKD = torch.where(reset[:, t, None, None], 0.0, tail_BKD)
        seen_BKD = torch.cat([tail_BKD, x_BTD[:, t, None]], dim=1)
        y_BD = torch.einsum("bkd,dk->bd", seen_BKD, weight_DK)
        outputs.append(y_BD if bias_D is None else y_BD + bias_D)
        moved_BKD = seen_BKD[:, 1:]
        tail_BKD = moved_BKD if mask is None else torch.where(mask[:, t, None, None], moved_BKD, tail_BKD)
    return zero_padding(torch.stack(outputs, dim=1), mask), ConvState(tail_BKD)


def _conv_tail(padded_BSD: Tensor, K: int, mask: Tensor | None, reset: Tensor | None, count_B: Tensor) -> ConvState:
    """The K - 1 inputs before the next token; those before its document's start are zeros."""
    if mask is None and reset is None:
        return ConvState(padded_BSD[:, padded_BSD.shape[1] - (K - 1) :])
    device = padded_BSD.device
    T = padded_BSD.shape[1] - (K - 1)
    read_B = torch.full_like(count_B, T) if mask is None else mask.long().sum(1)
    index_BK = read_B[:, None] + torch.arange(K - 1, device=device)
    tail_BKD = take_tokens(padded_BSD, index_BK)
    if reset is not None:
        # Slot i of the tail is K - 1 - i tokens back.
        inside_BK = torch.arange(K - 1, 0, -1, device=device) <= count_B[:, None]
        tail_BKD = torch.where((inside_BK | ~reset.any(1, keepdim=True))[..., None], tail_BKD, 0.0)
    return ConvState(tail_BKD)
