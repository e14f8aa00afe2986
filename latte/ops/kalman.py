"""Independent scalar Kalman filters, one for every channel and slot, as scans.

    den = a^2 + p l_{t-1}                               l-_t = l_{t-1} / den        the predicted precision
    l_t = l-_t + n_t k_t^2                              m_t = (l-_t / l_t) a m_{t-1} + (n_t k_t / l_t) v_t

The precision l follows a Moebius map with the positive matrix [[1 + p n k^2, a^2 n k^2], [p, a^2]]: products of such
matrices are an associative scan. The mean m is then a diagonal scan with gates below 1. l = 1 and m = 0 at the start.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops import native
from latte.ops.numbers import compute_dtype
from latte.ops.recompute import recomputed
from latte.ops.registry import Draw, Example, operation
from latte.ops.scan import ScanState, diagonal_scan
from latte.shapes import Axes
from latte.state import State, require_state, state
from latte.tokens import Tokens, require_tokens

# Tokens whose filters are in memory at once.
BLOCK = 64


@state
class KalmanState(State):
    """Precision and mean of every filter."""

    precision_BDN: Tensor
    mean_BDN: Tensor

    @classmethod
    def empty(cls, like_BT: Tensor, width: int, slots: int) -> KalmanState:
        one = torch.ones(like_BT.shape[0], width, slots, dtype=compute_dtype(like_BT), device=like_BT.device)
        return cls(one, torch.zeros_like(one))


def kalman_reference(
    v_BTD: Tensor,
    noise_BTD: Tensor,
    k_BTN: Tensor,
    q_BTN: Tensor,
    a_DN: Tensor,
    p_DN: Tensor,
    state: KalmanState,
    tokens: Tokens,
) -> tuple[Tensor, KalmanState]:
    """The filter as written, token by token."""
    precision, mean, outputs = state.precision_BDN, state.mean_BDN, []
    for t in range(v_BTD.shape[1]):
        if tokens.reset is not None:
            start = tokens.reset[:, t, None, None]
            precision, mean = torch.where(start, 1.0, precision), torch.where(start, 0.0, mean)
        n, k, v = noise_BTD[:, t, :, None], k_BTN[:, t, None], v_BTD[:, t, :, None]
        predicted = precision / (a_DN**2 + p_DN * precision)
        after = predicted + n * k**2
        moved = predicted / after * a_DN * mean + n * k / after * v
        if tokens.mask is not None:
            real = tokens.mask[:, t, None, None]
            after, moved = torch.where(real, after, precision), torch.where(real, moved, mean)
        precision, mean = after, moved
        outputs.append((mean * q_BTN[:, t, None]).sum(-1))
    return tokens.zero_padding(torch.stack(outputs, dim=1)), KalmanState(precision, mean)


def kalman_chunked(
    v_BTD: Tensor,
    noise_BTD: Tensor,
    k_BTN: Tensor,
    q_BTN: Tensor,
    a_DN: Tensor,
    p_DN: Tensor,
    state: KalmanState,
    tokens: Tokens,
) -> tuple[Tensor, KalmanState]:
    """Both scans by doubling, one block of tokens after another."""
    outputs, precision, mean = [], state.precision_BDN, state.mean_BDN
    for block, part in enumerate(tokens.parts(BLOCK)):
        here = slice(block * BLOCK, (block + 1) * BLOCK)
        given = (v_BTD[:, here], noise_BTD[:, here], k_BTN[:, here], q_BTN[:, here], a_DN, p_DN)
        y, precision, mean = recomputed(_block, *given, precision, mean, part)
        outputs.append(y)
    return tokens.zero_padding(torch.cat(outputs, dim=1)), KalmanState(precision, mean)


def _native(
    v_BTD: Tensor,
    noise_BTD: Tensor,
    k_BTN: Tensor,
    q_BTN: Tensor,
    a_DN: Tensor,
    p_DN: Tensor,
    state: KalmanState,
    tokens: Tokens,
) -> tuple[Tensor, KalmanState]:
    h_BDNZ = torch.stack([state.precision_BDN, state.mean_BDN], dim=-1)
    inputs = (v_BTD, noise_BTD, k_BTN, q_BTN, a_DN, p_DN)
    y_BTD, after_BDNZ = native.kalman(*inputs, h_BDNZ, tokens.mask, tokens.reset)
    return y_BTD, KalmanState(*(x.contiguous() for x in after_BDNZ.unbind(-1)))


def _block(
    v_BTD: Tensor,
    noise_BTD: Tensor,
    k_BTN: Tensor,
    q_BTN: Tensor,
    a_DN: Tensor,
    p_DN: Tensor,
    precision_BDN: Tensor,
    mean_BDN: Tensor,
    tokens: Tokens,
) -> tuple[Tensor, Tensor, Tensor]:
    n, k = noise_BTD[..., None], k_BTN[:, :, None]
    gain_BTDN = tokens.fill_padding(n * k, 0.0)
    added_BTDN = tokens.fill_padding(n * k**2, 0.0)
    upto_BTDN = _precisions(added_BTDN, a_DN, p_DN, precision_BDN, tokens)
    before_BTDN = torch.cat([precision_BDN[:, None], upto_BTDN[:, :-1]], dim=1)
    if tokens.reset is not None:
        before_BTDN = torch.where(tokens.reset[..., None, None], 1.0, before_BTDN)
    predicted_BTDN = before_BTDN / (a_DN**2 + p_DN * before_BTDN)
    after_BTDN = predicted_BTDN + added_BTDN
    mean_BTP, end = diagonal_scan(
        (predicted_BTDN / after_BTDN * a_DN).log().flatten(2),
        (gain_BTDN / after_BTDN * v_BTD[..., None]).flatten(2),
        state=ScanState(mean_BDN.flatten(1)),
        tokens=tokens,
    )
    y_BTD = (mean_BTP.view_as(after_BTDN) * q_BTN[:, :, None]).sum(-1)
    return y_BTD, upto_BTDN[:, -1].clone(), end.h_BD.view_as(mean_BDN)


def _precisions(added_BTDN: Tensor, a_DN: Tensor, p_DN: Tensor, start_BDN: Tensor, tokens: Tokens) -> Tensor:
    """l (B, T, D, N) from products of 2 x 2 matrices, each divided by the sum of its entries."""
    a2 = (a_DN**2).expand_as(added_BTDN)
    matrix = torch.stack([1 + p_DN * added_BTDN, a2 * added_BTDN, p_DN.expand_as(added_BTDN), a2], dim=-1)
    if tokens.mask is not None:  # padding is the identity
        unit = matrix.new_tensor([1.0, 0.0, 0.0, 1.0])
        matrix = torch.where(tokens.mask[..., None, None, None], matrix, unit)
    if tokens.reset is not None:  # a document's start maps every precision to what 1 becomes
        top, bottom = matrix[..., 0] + matrix[..., 1], matrix[..., 2] + matrix[..., 3]
        zero = torch.zeros_like(top)
        fresh = torch.stack([zero, top, zero, bottom], dim=-1)
        matrix = torch.where(tokens.reset[..., None, None, None], fresh, matrix)
    matrix = matrix / matrix.detach().sum(-1, keepdim=True)
    unit = matrix.new_tensor([1.0, 0.0, 0.0, 1.0])
    # Products that hold a document's start are complete: no gradient passes it, not even as rounding.
    begun_BT = torch.zeros_like(tokens.real_BT) if tokens.reset is None else tokens.reset
    distance = 1
    while distance < matrix.shape[1]:
        earlier = torch.cat([unit.expand_as(matrix[:, :distance]), matrix[:, :-distance]], dim=1)
        (e, f, g, h), (i, j, k, m) = matrix.unbind(-1), earlier.unbind(-1)
        both = torch.stack([e * i + f * k, e * j + f * m, g * i + h * k, g * j + h * m], dim=-1)
        both = both / both.detach().sum(-1, keepdim=True)
        matrix = torch.where(begun_BT[..., None, None, None], matrix, both)
        begun_BT = begun_BT | F.pad(begun_BT[:, :-distance], (distance, 0))
        distance *= 2
    e, f, g, h = matrix.unbind(-1)
    start = start_BDN[:, None]
    return (e * start + f) / (g * start + h)


def _example(draw: Draw) -> Example:
    v, noise = (draw.normal(draw.B, draw.T, 8) for _ in range(2))
    k, q = (F.normalize(draw.normal(draw.B, draw.T, 4), dim=-1) for _ in range(2))
    a, p = torch.exp(-draw.normal(8, 4).abs()), 0.1 * draw.normal(8, 4).abs() + 0.01
    return (v, noise.abs() + 0.1, k, q, a, p), {}


@operation(reference=kalman_reference, chunked=kalman_chunked, step=kalman_reference, native=_native, example=_example)
def kalman(
    v_BTD: Tensor,
    noise_BTD: Tensor,
    k_BTN: Tensor,
    q_BTN: Tensor,
    a_DN: Tensor,
    p_DN: Tensor,
    *,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """y_t = sum_n q_t[n] m_t[:, n]: posterior means of the filters above, read by q.

    Shapes: observations v and their precisions n > 0 (B, T, D); k and q (B, T, N); transition a and process variance
    p > 0 (D, N). Computed in float32 or better. Returns y (B, T, D), 0 at padding, and the :class:`KalmanState`.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, or a state of something else.
    """
    dtype = compute_dtype(v_BTD)
    v, noise, k, q, a, p = (x.to(dtype) for x in (v_BTD, noise_BTD, k_BTN, q_BTN, a_DN, p_DN))
    axes = Axes("kalman")
    axes.bind("v", v, "BTD")
    axes.bind("noise", noise, "BTD")
    axes.bind("k", k, "BTN")
    axes.bind("q", q, "BTN")
    axes.bind("a", a, "DN")
    sizes = axes.bind("p", p, "DN")
    tokens = require_tokens("kalman", tokens, v, state)
    before = require_state("kalman", state, KalmanState.empty(v, sizes["D"], sizes["N"]))
    return v, noise, k, q, a, p, before, tokens
