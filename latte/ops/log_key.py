"""Latte: attention as p(s|t) = sum_l p(s|l,t) p(l|t), causal (equations 7-14 of the paper) and bidirectional (6).

Keys come as *logits* k: p(s|l,t) = e^{k_sl - a_tl}, where a_tl = log sum_{s<=t} e^{k_sl} is all that t decides. The
state holds a and the mean S[l] = sum_s p(s|l,t) v_s, which is a convex combination of values and so never grows:

    S_t = e^{a_{t-1} - a_t} S_{t-1} + e^{k_t - a_t} v_t^T        y_t = p(.|t)^T S_t

This is a gated recurrence (gated.py) with cumulative gate -a and key e^{k - a}; every exponent is at most 0 for any
logits, and nothing is ever compared with a maximum that the future could change. Ordinary logits take a shorter way to
the same outputs, relative to the first key of their chunk, with no logarithm a token.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.modes import values_hidden
from latte.ops import native
from latte.ops.decay import document_attention
from latte.ops.gated import (
    BLOCK,
    Chunks,
    Outputs,
    chunk_size,
    pad_tokens,
    pass_states,
    read_states,
    seen_within,
    segments_before,
    to_chunks,
    within_channels,
)
from latte.ops.nonfinite import contained
from latte.ops.numbers import EMPTY, bounded_exp, compute_dtype, exp_where, log_add, wide_dtype
from latte.ops.registry import Draw, Example, operation
from latte.shapes import Axes
from latte.state import State, require_state, state
from latte.tokens import Tokens, require_tokens

# How far above or below the first logit of a chunk float32 can follow on its scale: e to twice this is still a number,
# which the product of a query and a key that it does not see may be, before it is set to 0.
COMMON_RANGE = 38.0


@state
class LatteState(State):
    """What the latents know: log alpha of equation (10), and the mean value under each, v~ / alpha of equation (13)."""

    log_norm_BHM: Tensor
    mean_BHMV: Tensor

    @classmethod
    def empty(cls, like_BT: Tensor, heads: int, latents: int, width: int) -> LatteState:
        B, device = like_BT.shape[0], like_BT.device
        return cls(
            torch.full((B, heads, latents), EMPTY, dtype=wide_dtype(device), device=device),
            torch.zeros(B, heads, latents, width, dtype=compute_dtype(like_BT), device=device),
        )


@contained(numbers=(2,), logits=(1,))
def causal_latte_reference(
    p_BTHM: Tensor, k_BTHM: Tensor, v_BTHV: Tensor, state: LatteState, tokens: Tokens
) -> tuple[Tensor, LatteState]:
    """Equations (8) and (9) as written: a softmax over s for every t and l. Quadratic in T.

    What a state has read enters as one more token, with its own value for every latent.
    """
    dtype = compute_dtype(p_BTHM)
    p, k, v = p_BTHM.to(dtype), k_BTHM.to(dtype), v_BTHV.to(dtype)
    # Column 0 is the state, which belongs to document 0.
    seen_BTS = torch.cat([(tokens.segment_BT == 0)[:, :, None], tokens.seen_BTS(causal=True)], dim=2)
    logits_BSHM = torch.cat([state.log_norm_BHM[:, None], k.to(state.log_norm_BHM.dtype)], dim=1)
    logits_BTSHM = logits_BSHM[:, None].masked_fill(~seen_BTS[..., None, None], EMPTY)
    log_norm_BTHM = logits_BTSHM.logsumexp(dim=2)
    weights_BTSHM = (logits_BTSHM - log_norm_BTHM[:, :, None]).exp().to(dtype) * seen_BTS[..., None, None]  # p(s|l,t)
    mean_BTHMV = torch.einsum("btshm,bshv->bthmv", weights_BTSHM[:, :, 1:], v)
    mean_BTHMV = mean_BTHMV + weights_BTSHM[:, :, 0, ..., None] * state.mean_BHMV[:, None]
    y_BTHV = torch.einsum("bthm,bthmv->bthv", p, mean_BTHMV)
    after = LatteState(log_norm_BTHM[:, -1], mean_BTHMV[:, -1])
    return tokens.zero_padding(y_BTHV).to(v_BTHV.dtype), after


def causal_latte_step(
    p_B1HM: Tensor, k_B1HM: Tensor, v_B1HV: Tensor, state: LatteState, tokens: Tokens
) -> tuple[Tensor, LatteState]:
    """One token of the recurrence, equation (14), on the normalised state."""
    log_norm_BHM, mean_BHMV = state.log_norm_BHM, state.mean_BHMV
    k_BHM, v_BH1V = k_B1HM[:, 0].to(log_norm_BHM.dtype), v_B1HV[:, 0, :, None].to(mean_BHMV.dtype)
    if tokens.mask is not None:
        k_BHM = torch.where(tokens.mask[:, :, None], k_BHM, EMPTY)
        v_BH1V = torch.where(tokens.mask[:, :, None, None], v_BH1V, 0.0)
    if tokens.reset is not None:
        log_norm_BHM = torch.where(tokens.reset[:, :, None], EMPTY, log_norm_BHM)
        mean_BHMV = torch.where(tokens.reset[:, :, None, None], 0.0, mean_BHMV)
    after_BHM = log_add(log_norm_BHM, k_BHM)
    # Moving the mean towards v by the new token's share keeps its precision when that share is tiny.
    share_BHM1 = (k_BHM - after_BHM).exp().to(mean_BHMV.dtype)[..., None]
    mean_BHMV = mean_BHMV + share_BHM1 * (v_BH1V - mean_BHMV)
    y_B1HV = (p_B1HM[:, 0, :, None].to(mean_BHMV.dtype) @ mean_BHMV).transpose(1, 2)
    return tokens.zero_padding(y_B1HV).to(v_B1HV.dtype), LatteState(after_BHM, mean_BHMV)


@contained(numbers=(2,), logits=(1,))
def causal_latte_chunked(
    p_BTHM: Tensor, k_BTHM: Tensor, v_BTHV: Tensor, state: LatteState, tokens: Tokens
) -> tuple[Tensor, LatteState]:
    """Equations (11) and (12) as matrix products over chunks: linear time, memory linear in T with a small constant."""
    T, dtype = p_BTHM.shape[1], compute_dtype(p_BTHM)
    segment_BT = tokens.segment_BT
    size = chunk_size(T)
    outputs = Outputs(v_BTHV, dtype)
    for start in range(0, T, BLOCK):
        block = slice(start, min(start + BLOCK, T))
        extra = -(block.stop - block.start) % size
        p, k, v = (x[:, block].to(dtype) for x in (p_BTHM, k_BTHM, v_BTHV))
        if tokens.mask is not None:
            real = tokens.mask[:, block, None, None]
            k, v = torch.where(real, k, EMPTY), torch.where(real, v, 0.0)
        segment = segment_BT[:, block]
        # Padding behind the row continues its last document with keys of no weight.
        segment = torch.cat([segment, segment[:, -1:].expand(-1, extra)], dim=1)
        p, k, v = pad_tokens(p, extra), pad_tokens(k, extra, EMPTY), pad_tokens(v, extra)
        segments = to_chunks(segment, size)
        y_BNHCV, state = _block(
            Piece(
                p.unflatten(1, (-1, size)),
                k.unflatten(1, (-1, size)),
                to_chunks(v, size),
                segments,
                segments_before(segments),
            ),
            state,
        )
        # The state now belongs to the last token's document: number documents from there.
        segment_BT = segment_BT - segment[:, -1:]
        outputs.append(y_BNHCV, block.stop - block.start)
    return tokens.zero_padding(outputs.joined()).to(v_BTHV.dtype), state


class Piece(NamedTuple):
    """One block of tokens, cut into N chunks of C; keys of no weight are EMPTY."""

    p_BNCHM: Tensor
    k_BNCHM: Tensor
    v_BNHCV: Tensor
    segment_BNC: Tensor
    segment_in_BN: Tensor  # the document of the state that each chunk gets

    def continues(self) -> Tensor:
        """Which tokens belong to the document of the state that their chunk gets, (B, N, C)."""
        return self.segment_BNC == self.segment_in_BN[..., None]


def _block(x: Piece, state: LatteState) -> tuple[Tensor, LatteState]:
    before, after = _pass_states(x, state)
    if values_hidden(x.k_BNCHM):
        return _on_own_scales(x, before), after
    y_BNHCV, fits_BNHC1 = _on_one_scale(x, before)
    if fits_BNHC1 is not None:
        y_BNHCV = torch.where(fits_BNHC1, y_BNHCV, _on_own_scales(x, before))
    return y_BNHCV, after


class Before(NamedTuple):
    """What each chunk gets: LatteState with an axis of chunks."""

    log_norm_BNHM: Tensor
    mean_BNHMV: Tensor


def _pass_states(x: Piece, state: LatteState) -> tuple[Before, LatteState]:
    """From chunk to chunk. A chunk adds what it holds at its end, so its weights may be relative to its largest key.

    Log-normalisers are as wide as the state's: e to their differences would show what float32 rounds off large ones.
    """
    narrow, wide = x.p_BNCHM.dtype, state.log_norm_BHM.dtype
    last_BN = x.segment_BNC[..., -1]
    kept_BNCHM = (x.segment_BNC == last_BN[..., None])[..., None, None] & ~(x.k_BNCHM <= EMPTY / 2)
    k_BNCHM = torch.where(kept_BNCHM, x.k_BNCHM, EMPTY)
    top_BN1HM = k_BNCHM.detach().amax(dim=2, keepdim=True)
    weight_BNCHM = torch.where(kept_BNCHM, bounded_exp(k_BNCHM - top_BN1HM), 0.0)
    sum_BNHM, top_BNHM = weight_BNCHM.sum(dim=2, dtype=wide), top_BN1HM[:, :, 0].to(wide)
    some_BNHM = sum_BNHM > 0
    ends_BNHM = torch.where(some_BNHM, top_BNHM + torch.where(some_BNHM, sum_BNHM, 1.0).log(), EMPTY)
    upto_BNHM = _log_cumulative(
        torch.cat([state.log_norm_BHM[:, None], ends_BNHM], dim=1).transpose(1, 2), F.pad(last_BN, (1, 0))[:, None]
    ).transpose(1, 2)
    before_BNHM, after_BNHM = upto_BNHM[:, :-1], upto_BNHM[:, 1:]

    share_BNHM1 = bounded_exp((top_BNHM - after_BNHM).to(narrow))[..., None]
    added_BNHMV = share_BNHM1 * (weight_BNCHM.permute(0, 1, 3, 4, 2) @ x.v_BNHCV)
    carry_BNHM = exp_where(x.p_BNCHM, (last_BN == x.segment_in_BN)[..., None, None], before_BNHM - after_BNHM)
    before_BNHMV, after_BHMV = pass_states(carry_BNHM, added_BNHMV, state.mean_BHMV)
    return Before(before_BNHM, before_BNHMV), LatteState(after_BNHM[:, -1].clone(), after_BHMV)


def _on_one_scale(x: Piece, before: Before) -> tuple[Tensor, Tensor | None]:
    """Outputs with all weights of a chunk relative to its first key, which later ones cannot change.

    Ordinary logits allow it: a weight is then a product of two factors. The second result says for which tokens all
    factors were in range, a later key changing nothing for earlier tokens; None stands for all of them.
    """
    narrow = x.p_BNCHM.dtype
    real_BNCHM = ~(x.k_BNCHM <= EMPTY / 2)  # a NaN is no padding
    first_BN = real_BNCHM.flatten(3).any(-1).to(torch.uint8).argmax(dim=-1)
    index_BN1HM = first_BN[..., None, None, None].expand(-1, -1, 1, *x.k_BNCHM.shape[3:])
    scale_BN1HM = x.k_BNCHM.detach().gather(2, index_BN1HM)
    scale_BN1HM = torch.where(scale_BN1HM > EMPTY / 2, scale_BN1HM, 0.0)

    above_BNCHM = x.k_BNCHM - scale_BN1HM
    weight_BNCHM = torch.where(real_BNCHM, bounded_exp(above_BNCHM, COMMON_RANGE), 0.0)
    seen_BNCC = seen_within(x.segment_BNC).to(narrow)
    sum_BNCHM = (seen_BNCC @ weight_BNCHM.flatten(3)).view_as(weight_BNCHM)
    above_BN1HM = before.log_norm_BNHM[:, :, None] - scale_BN1HM
    carried_BN1HM = bounded_exp(above_BN1HM.to(narrow), COMMON_RANGE) * (above_BN1HM > EMPTY / 2)
    continues_BNC11 = x.continues()[..., None, None]
    norm_BNCHM = sum_BNCHM + carried_BN1HM * continues_BNC11

    # The bound keeps what is out of range finite; a token that sees nothing has no weight to divide.
    share_BNHCM = (x.p_BNCHM / norm_BNCHM.clamp_min(math.exp(-COMMON_RANGE - 1.0))).transpose(2, 3).contiguous()
    weight_BNHCM = weight_BNCHM.transpose(2, 3).contiguous()
    carried_BNHMV = carried_BN1HM[:, :, 0, ..., None] * before.mean_BNHMV
    y_BNHCV = (share_BNHCM @ weight_BNHCM.mT * seen_BNCC[:, :, None]) @ x.v_BNHCV
    y_BNHCV = y_BNHCV + (share_BNHCM @ carried_BNHMV) * continues_BNC11.transpose(2, 3)

    with torch.no_grad():
        least = math.exp(-COMMON_RANGE)
        far_BN1HM = above_BN1HM > COMMON_RANGE
        if not bool((above_BNCHM.amax() > COMMON_RANGE) | far_BN1HM.any() | (norm_BNCHM.amin() < least)):
            return y_BNHCV, None
        high_BNCHM = (above_BNCHM > COMMON_RANGE).to(torch.uint8).cummax(dim=2).values.bool()
        low_BNCHM = (norm_BNCHM > 0) & (norm_BNCHM < least)
        misfit_BNCHM = high_BNCHM | low_BNCHM | (far_BN1HM & continues_BNC11)
        fits_BNHC1 = ~misfit_BNCHM.any(dim=-1, keepdim=True).transpose(2, 3)
    return y_BNHCV, None if bool(fits_BNHC1.all()) else fits_BNHC1


def _on_own_scales(x: Piece, before: Before) -> Tensor:
    """Outputs for any logits: every token's weights relative to its own log-normaliser."""
    p_BNHCM, k_BNHCM = (t.transpose(2, 3) for t in (x.p_BNCHM, x.k_BNCHM))
    wide_BNHCM = k_BNHCM.to(before.log_norm_BNHM.dtype)
    log_norm_BNHCM = _log_cumulative(wide_BNHCM, x.segment_BNC[:, :, None])
    log_norm_BNHCM = torch.where(
        x.continues()[:, :, None, :, None],
        log_add(log_norm_BNHCM, before.log_norm_BNHM[..., None, :]),
        log_norm_BNHCM,
    )
    chunks = Chunks(
        p_BNHCM,
        bounded_exp((wide_BNHCM - log_norm_BNHCM).to(p_BNHCM.dtype)) * ~(k_BNHCM <= EMPTY / 2),
        x.v_BNHCV,
        -log_norm_BNHCM,
        -before.log_norm_BNHM,
        before.log_norm_BNHM - log_norm_BNHCM[..., -1, :],
        x.segment_BNC,
        x.segment_in_BN,
    )
    return within_channels(chunks) + read_states(chunks, before.mean_BNHMV)


def _log_cumulative(k_CM: Tensor, segment_C: Tensor) -> Tensor:
    """log of the running sum of e^k over the axis before the last, restarting with each document.

    By doubling, for any logits: no sum ever meets a later one's scale.
    """
    C = k_CM.shape[-2]
    distance = 1
    while distance < C:
        earlier = F.pad(k_CM[..., :-distance, :], (0, 0, distance, 0), value=EMPTY)
        same = F.pad(segment_C[..., distance:] == segment_C[..., :-distance], (distance, 0))
        k_CM = torch.where(same[..., None], log_add(k_CM, earlier), k_CM)
        distance *= 2
    return k_CM


def _native(
    p_BTHM: Tensor, k_BTHM: Tensor, v_BTHV: Tensor, state: LatteState, tokens: Tokens
) -> tuple[Tensor, LatteState]:
    flags = (tokens.mask, tokens.reset)
    y_BTHV, *after = native.causal_latte(p_BTHM, k_BTHM, v_BTHV, state.log_norm_BHM, state.mean_BHMV, *flags)
    return y_BTHV, LatteState(*after)


def _example(draw: Draw) -> Example:
    p, k, v = (draw.normal(draw.B, draw.T, 4, width) for width in (16, 16, 24))
    return (p.softmax(-1), k, v), {}


@operation(
    reference=causal_latte_reference,
    chunked=causal_latte_chunked,
    step=causal_latte_step,
    native=_native,
    example=_example,
)
def causal_latte(
    p_BTHM: Tensor,
    k_BTHM: Tensor,
    v_BTHV: Tensor,
    *,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """Causal Latte, equation (7): y_t = sum_l p(l|t) sum_{s<=t} p(s|l,t) v_s.

    Shapes: p = p(l|t) and the key logits k (B, T, H, M), values v (B, T, H, V). Returns y (B, T, H, V), 0 at padding,
    and the :class:`LatteState` after these tokens.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, or a state of something else.
    """
    axes = Axes("causal_latte")
    axes.bind("p", p_BTHM, "BTHM")
    axes.bind("k", k_BTHM, "BTHM")
    sizes = axes.bind("v", v_BTHV, "BTHV")
    tokens = require_tokens("causal_latte", tokens, p_BTHM, state)
    before = require_state("causal_latte", state, LatteState.empty(p_BTHM, sizes["H"], sizes["M"], sizes["V"]))
    return p_BTHM, k_BTHM, v_BTHV, before, tokens


def bidirectional_latte_reference(p_BTHM: Tensor, k_BTHM: Tensor, v_BTHV: Tensor, tokens: Tokens) -> Tensor:
    """Equation (6) as written: a softmax over s for every t and l. Quadratic in T."""
    p, k, v = (x.to(compute_dtype(x)) for x in (p_BTHM, k_BTHM, v_BTHV))
    seen_BTS = tokens.seen_BTS(causal=False)
    weights_BTSHM = torch.where(seen_BTS[..., None, None], k[:, None], EMPTY).softmax(dim=2)  # p(s|l)
    y_BTHV = torch.einsum("bthm,btshm,bshv->bthv", p, weights_BTSHM, v)
    return tokens.zero_padding(y_BTHV).to(v_BTHV.dtype)


def bidirectional_latte_chunked(p_BTHM: Tensor, k_BTHM: Tensor, v_BTHV: Tensor, tokens: Tokens) -> Tensor:
    """One softmax of the keys per document, then linear attention with it. Linear in T."""
    p, k, v = (x.to(compute_dtype(p_BTHM)) for x in (p_BTHM, k_BTHM, v_BTHV))
    k, v = tokens.fill_padding(k, EMPTY), tokens.fill_padding(v, 0.0)
    if tokens.reset is None:
        share_BTHM = k.softmax(dim=1)
    else:
        # Shifting the logits of a document changes nothing: by its own maximum, which carries no gradient.
        index_BTHM = tokens.segment_BT[..., None, None].expand_as(k)
        room_BTHM = F.pad(k, (0, 0, 0, 0, 0, 1))  # a row of T first tokens has documents 1 to T
        top_BTHM = torch.full_like(room_BTHM, EMPTY).scatter_reduce(1, index_BTHM, k.detach(), "amax")
        weight_BTHM = (k - top_BTHM.gather(1, index_BTHM)).exp()
        norm_BTHM = torch.zeros_like(room_BTHM).scatter_add(1, index_BTHM, weight_BTHM)
        share_BTHM = weight_BTHM / norm_BTHM.gather(1, index_BTHM)
    return document_attention(p, share_BTHM, v, tokens=tokens).to(v_BTHV.dtype)


@operation(reference=bidirectional_latte_reference, chunked=bidirectional_latte_chunked, example=_example)
def bidirectional_latte(
    p_BTHM: Tensor, k_BTHM: Tensor, v_BTHV: Tensor, *, tokens: Tokens | None = None
) -> tuple[Any, ...]:
    """Bidirectional Latte, equation (6): y_t = sum_l p(l|t) sum_s p(s|l) v_s over the real tokens of t's document.

    Shapes: p = p(l|t) and the key logits k (B, T, H, M), values v (B, T, H, V). Padding is taken out before the
    softmax, never afterwards. Returns y (B, T, H, V), 0 at padding.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, or no tokens.
    """
    axes = Axes("bidirectional_latte")
    axes.bind("p", p_BTHM, "BTHM")
    axes.bind("k", k_BTHM, "BTHM")
    axes.bind("v", v_BTHV, "BTHV")
    return p_BTHM, k_BTHM, v_BTHV, require_tokens("bidirectional_latte", tokens, p_BTHM)
