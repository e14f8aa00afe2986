"""The WKV recurrence of RWKV-4 (Peng et al., 2023): per channel, a fading mean of values with a bonus for the present.

    wkv_t = [sum_{s<t} e^{k_s - (t-1-s) w} v_s + e^{u + k_t} v_t] / [the same sum of weights]

The state is the log-normaliser a and the mean S over the past, a convex combination of values that never grows:

    wkv_t = S_{t-1} + sigmoid(u + k_t - a_{t-1}) (v_t - S_{t-1})
    a_t = log(e^{a_{t-1} - w} + e^{k_t})        S_t = e^{a_{t-1} - w - a_t} S_{t-1} + e^{k_t - a_t} v_t

So it is Latte with one latent per channel, read before it is written, and every exponent is at most 0 for any logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from latte.ops.log_scan import log_scan
from latte.ops.numbers import EMPTY, compute_dtype, log_add, wide_dtype
from latte.ops.recompute import recomputed
from latte.ops.registry import Draw, Example, operation
from latte.ops.scan import ScanState, diagonal_scan
from latte.shapes import Axes
from latte.state import State, require_state, state
from latte.tokens import Tokens, require_tokens

# Tokens worked on at a time: scratch in float64 is that of a block.
BLOCK = 1024


@state
class WKVState(State):
    """Log-normaliser and mean value of every channel."""

    log_norm_BD: Tensor
    mean_BD: Tensor

    @classmethod
    def empty(cls, like_BT: Tensor, width: int) -> WKVState:
        shape, device = (like_BT.shape[0], width), like_BT.device
        return cls(
            torch.full(shape, EMPTY, dtype=wide_dtype(device), device=device),
            torch.zeros(shape, dtype=compute_dtype(like_BT), device=device),
        )


def wkv_reference(
    k_BTD: Tensor, v_BTD: Tensor, decay_D: Tensor, bonus_D: Tensor, state: WKVState, tokens: Tokens
) -> tuple[Tensor, WKVState]:
    """The recurrence as written, token by token."""
    a, mean = state.log_norm_BD, state.mean_BD
    k_BTD, decay_D, bonus_D = (x.to(a.dtype) for x in (k_BTD, decay_D, bonus_D))
    outputs = []
    for t in range(k_BTD.shape[1]):
        k, v = k_BTD[:, t], v_BTD[:, t].to(mean.dtype)
        if tokens.reset is not None:
            a = torch.where(tokens.reset[:, t, None], EMPTY, a)
            mean = torch.where(tokens.reset[:, t, None], 0.0, mean)
        outputs.append(mean + torch.sigmoid(bonus_D + k - a).to(mean.dtype) * (v - mean))
        after = log_add(a - decay_D, k)
        # Moving the mean towards v by the new token's share keeps its precision when that share is tiny.
        moved = mean + (k - after).exp().to(mean.dtype) * (v - mean)
        if tokens.mask is not None:
            real = tokens.mask[:, t, None]
            after, moved = torch.where(real, after, a), torch.where(real, moved, mean)
        a, mean = after, moved
    return tokens.zero_padding(torch.stack(outputs, dim=1)).to(v_BTD.dtype), WKVState(a, mean)


def wkv_chunked(
    k_BTD: Tensor, v_BTD: Tensor, decay_D: Tensor, bonus_D: Tensor, state: WKVState, tokens: Tokens
) -> tuple[Tensor, WKVState]:
    """A scan of logs, then a diagonal scan: linear time and memory."""
    return _in_blocks(k_BTD, v_BTD, decay_D, bonus_D, state, tokens, "torch")


def _native(
    k_BTD: Tensor, v_BTD: Tensor, decay_D: Tensor, bonus_D: Tensor, state: WKVState, tokens: Tokens
) -> tuple[Tensor, WKVState]:
    return _in_blocks(k_BTD, v_BTD, decay_D, bonus_D, state, tokens, "native")


def _in_blocks(
    k_BTD: Tensor, v_BTD: Tensor, decay_D: Tensor, bonus_D: Tensor, state: WKVState, tokens: Tokens, backend: str
) -> tuple[Tensor, WKVState]:
    outputs = []
    for block, part in enumerate(tokens.parts(BLOCK)):
        here = slice(block * BLOCK, (block + 1) * BLOCK)
        given = (k_BTD[:, here], v_BTD[:, here], decay_D, bonus_D, state.log_norm_BD, state.mean_BD)
        y, *after = recomputed(_block, *given, part, backend)
        state = WKVState(*after)
        outputs.append(y)
    return tokens.zero_padding(torch.cat(outputs, dim=1)), state


def _block(
    k_BTD: Tensor,
    v_BTD: Tensor,
    decay_D: Tensor,
    bonus_D: Tensor,
    a_BD: Tensor,
    mean_BD: Tensor,
    tokens: Tokens,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of a block, and log-normaliser and mean after it.

    The mean is scanned in the normaliser's dtype: where a channel hardly fades, float32 would round its pace.
    """
    k, v, decay, bonus = (x.to(a_BD.dtype) for x in (k_BTD, v_BTD, decay_D, bonus_D))
    k, v = tokens.fill_padding(k, EMPTY), tokens.fill_padding(v, 0.0)
    gate = tokens.fill_padding((-decay).expand_as(k), 0.0)
    if tokens.reset is not None:
        gate = torch.where(tokens.reset[..., None], EMPTY, gate)
    a_BTD = log_scan(gate, k, a_BD)
    before_BTD = torch.cat([a_BD[:, None], a_BTD[:, :-1]], dim=1)
    fade, share = before_BTD + gate - a_BTD, (k - a_BTD).exp()
    if tokens.reset is not None:
        # Padding may stand at a boundary: it forgets, and has nothing of its own yet.
        fade, before_BTD = (torch.where(tokens.reset[..., None], EMPTY, x) for x in (fade, before_BTD))
    mean_BTD, after = diagonal_scan(fade, share * v, state=ScanState(mean_BD.to(a_BD.dtype)), backend=backend)
    read_BTD = torch.cat([mean_BD[:, None].to(a_BD.dtype), mean_BTD[:, :-1]], dim=1)
    if tokens.reset is not None:
        read_BTD = torch.where(tokens.reset[..., None], 0.0, read_BTD)
    y_BTD = read_BTD + torch.sigmoid(bonus + k - before_BTD) * (v - read_BTD)
    return y_BTD.to(v_BTD.dtype), a_BTD[:, -1].clone(), after.h_BD.to(mean_BD.dtype)


def _example(draw: Draw) -> Example:
    k, v = (draw.normal(draw.B, draw.T, 16) for _ in range(2))
    return (k, v, draw.normal(16).abs(), draw.normal(16)), {}


@operation(reference=wkv_reference, chunked=wkv_chunked, step=wkv_reference, native=_native, example=_example)
def wkv(
    k_BTD: Tensor,
    v_BTD: Tensor,
    decay_D: Tensor,
    bonus_D: Tensor,
    *,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """The recurrence above: the mean of values under fading weights e^k, the present token's raised by the bonus.

    Shapes: key logits k and values v (B, T, D); decay w, at least 0, and bonus u (D,). Returns wkv (B, T, D), 0 at
    padding, and the :class:`WKVState` after these tokens.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, or a state of something else.
    """
    axes = Axes("wkv")
    axes.bind("k", k_BTD, "BTD")
    axes.bind("v", v_BTD, "BTD")
    axes.bind("decay", decay_D, "D")
    sizes = axes.bind("bonus", bonus_D, "D")
    tokens = require_tokens("wkv", tokens, k_BTD, state)
    before = require_state("wkv", state, WKVState.empty(k_BTD, sizes["D"]))
    return k_BTD, v_BTD, decay_D, bonus_D, before, tokens
