"""Latte: attention as p(s|t) = sum_l p(s|l,t) p(l|t), causal (equations 7-14 of the paper) and bidirectional (6).

Keys come as *logits* k: p(s|l,t) = e^{k_sl - a_tl}, where a_tl = log sum_{s<=t} e^{k_sl} is all that t decides. The
state holds a and the mean S[l] = sum_s p(s|l,t) v_s, which is a convex combination of values and so never grows:

    S_t = e^{a_{t-1} - a_t} S_{t-1} + e^{k_t - a_t} v_t^T        y_t = p(.|t)^T S_t

This is a gated recurrence (gated.py) with cumulative gate -a and key e^{k - a}; every exponent is at most 0 for any
logits, and nothing is ever compared with a maximum that the future could change.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops.backends import choose_backend, compute_dtype, exact, wide_dtype
from latte.ops.decay import document_attention
from latte.ops.gated import (
    BLOCK,
    Chunks,
    bounded_exp,
    chunk_size,
    from_chunks,
    gated_chunks,
    pad_tokens,
    seen_within,
    segments_before,
    to_chunks,
    within_channels,
)
from latte.ops.tokens import segment_ids, whole_document, zero_padding
from latte.shapes import Axes
from latte.state import State, require_state, state

# The log of an empty sum. Finite, so that differences of it are numbers.
EMPTY = -1e30
# How far above or below the first logit of a chunk float32 can follow on its scale: e to twice this is still a number,
# which the product of a query and a key of different documents may be, before it is set to 0.
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


@exact
def causal_latte(
    p_BTHM: Tensor,
    k_BTHM: Tensor,
    v_BTHV: Tensor,
    *,
    state: State | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, LatteState]:
    """Causal Latte, equation (7): y_t = sum_l p(l|t) sum_{s<=t} p(s|l,t) v_s.

    Shapes: p = p(l|t) and the key logits k (B, T, H, M), values v (B, T, H, V); y (B, T, H, V), 0 at padding.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, or a state of something else.
    """
    axes = Axes("causal_latte")
    axes.bind("p", p_BTHM, "BTHM")
    axes.bind("k", k_BTHM, "BTHM")
    sizes = axes.bind("v", v_BTHV, "BTHV")
    axes.flags("mask", mask)
    axes.flags("reset", reset)
    before = require_state("causal_latte", state, LatteState.empty(p_BTHM, sizes["H"], sizes["M"], sizes["V"]))
    chosen = choose_backend("causal_latte", backend, p_BTHM)
    if backend is None and sizes["T"] == 1:
        return causal_latte_step(p_BTHM, k_BTHM, v_BTHV, before, mask, reset)
    if chosen == "native":
        from latte.ops import native

        y_BTHV, *after = native.causal_latte(p_BTHM, k_BTHM, v_BTHV, before.log_norm_BHM, before.mean_BHMV, mask, reset)
        return y_BTHV, LatteState(*after)
    run = causal_latte_reference if chosen == "reference" else causal_latte_chunked
    return run(p_BTHM, k_BTHM, v_BTHV, before, mask, reset)


def causal_latte_reference(
    p_BTHM: Tensor, k_BTHM: Tensor, v_BTHV: Tensor, state: LatteState, mask: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, LatteState]:
    """Equations (8) and (9) as written: a softmax over s for every t and l. Quadratic in T.

    What a state has read enters as one more token, with its own value for every latent.
    """
    T, dtype = p_BTHM.shape[1], compute_dtype(p_BTHM)
    p, k, v = p_BTHM.to(dtype), k_BTHM.to(dtype), v_BTHV.to(dtype)
    segment_BT = segment_ids(reset, p_BTHM)
    real_BT = torch.ones_like(segment_BT, dtype=torch.bool) if mask is None else mask
    seen_BTS = (segment_BT[:, :, None] == segment_BT[:, None, :]) & real_BT[:, None, :]
    seen_BTS &= torch.ones(T, T, dtype=torch.bool, device=p.device).tril()
    # Column 0 is the state, which belongs to document 0.
    seen_BTS = torch.cat([(segment_BT == 0)[:, :, None], seen_BTS], dim=2)
    logits_BSHM = torch.cat([state.log_norm_BHM[:, None], k.to(state.log_norm_BHM.dtype)], dim=1)
    logits_BTSHM = logits_BSHM[:, None].masked_fill(~seen_BTS[..., None, None], EMPTY)
    log_norm_BTHM = logits_BTSHM.logsumexp(dim=2)
    weights_BTSHM = (logits_BTSHM - log_norm_BTHM[:, :, None]).exp().to(dtype) * seen_BTS[..., None, None]  # p(s|l,t)
    mean_BTHMV = torch.einsum("btshm,bshv->bthmv", weights_BTSHM[:, :, 1:], v)
    mean_BTHMV = mean_BTHMV + weights_BTSHM[:, :, 0, ..., None] * state.mean_BHMV[:, None]
    y_BTHV = torch.einsum("bthm,bthmv->bthv", p, mean_BTHMV)
    after = LatteState(log_norm_BTHM[:, -1], mean_BTHMV[:, -1])
    return zero_padding(y_BTHV, mask).to(v_BTHV.dtype), after


def causal_latte_step(
    p_B1HM: Tensor, k_B1HM: Tensor, v_B1HV: Tensor, state: LatteState, mask: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, LatteState]:
    """One token of the recurrence, equation (14), on the normalised state."""
    log_norm_BHM, mean_BHMV = state.log_norm_BHM, state.mean_BHMV
    k_BHM, v_BH1V = k_B1HM[:, 0].to(log_norm_BHM.dtype), v_B1HV[:, 0, :, None].to(mean_BHMV.dtype)
    if mask is not None:
        k_BHM = torch.where(mask[:, :, None], k_BHM, EMPTY)
        v_BH1V = torch.where(mask[:, :, None, None], v_BH1V, 0.0)
    if reset is not None:
        log_norm_BHM = torch.where(reset[:, :, None], EMPTY, log_norm_BHM)
        mean_BHMV = torch.where(reset[:, :, None, None], 0.0, mean_BHMV)
    after_BHM = torch.logaddexp(log_norm_BHM, k_BHM)
    # Moving the mean towards v by the new token's share keeps its precision when that share is tiny.
    share_BHM1 = (k_BHM - after_BHM).exp().to(mean_BHMV.dtype)[..., None]
    mean_BHMV = mean_BHMV + share_BHM1 * (v_BH1V - mean_BHMV)
    y_B1HV = (p_B1HM[:, 0, :, None].to(mean_BHMV.dtype) @ mean_BHMV).transpose(1, 2)
    return zero_padding(y_B1HV, mask).to(v_B1HV.dtype), LatteState(after_BHM, mean_BHMV)


def causal_latte_chunked(
    p_BTHM: Tensor, k_BTHM: Tensor, v_BTHV: Tensor, state: LatteState, mask: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, LatteState]:
    """Equations (11) and (12) as matrix products over chunks: linear time, memory linear in T with a small constant."""
    T, dtype = p_BTHM.shape[1], compute_dtype(p_BTHM)
    segment_BT = segment_ids(reset, p_BTHM)
    size = chunk_size(T)
    outputs = []
    for start in range(0, T, BLOCK):
        block = slice(start, min(start + BLOCK, T))
        extra = -(block.stop - block.start) % size
        p, k, v = (x[:, block].to(dtype) for x in (p_BTHM, k_BTHM, v_BTHV))
        if mask is not None:
            real = mask[:, block, None, None]
            k, v = torch.where(real, k, EMPTY), torch.where(real, v, 0.0)
        segment = segment_BT[:, block]
        # Padding behind the row continues its last document with keys of no weight.
        segment = torch.cat([segment, segment[:, -1:].expand(-1, extra)], dim=1)
        p, k, v = pad_tokens(p, extra), pad_tokens(k, extra, EMPTY), pad_tokens(v, extra)
        p, k, v, segments = (to_chunks(x, size) for x in (p, k, v, segment))
        y_BNHCV, state = _block(p, k, v, segments, state)
        # The state now belongs to the last token's document: number documents from there.
        segment_BT = segment_BT - segment[:, -1:]
        outputs.append(from_chunks(y_BNHCV)[:, : block.stop - block.start])
    return zero_padding(torch.cat(outputs, dim=1), mask).to(v_BTHV.dtype), state


def _block(
    p_BNHCM: Tensor, k_BNHCM: Tensor, v_BNHCV: Tensor, segment_BNC: Tensor, state: LatteState
) -> tuple[Tensor, LatteState]:
    segment_in_BN = segments_before(segment_BNC)
    # Log-normalisers within each chunk, then of everything before it, then both together; as wide as the state's,
    # because e to their differences would show what float32 rounds off large ones.
    k_BNHCM = k_BNHCM.to(state.log_norm_BHM.dtype)
    scaled = None if torch.compiler.is_compiling() else _scale(k_BNHCM, segment_BNC)
    local_BNHCM = _log_cumulative(k_BNHCM, segment_BNC, scaled)
    ends_BNHM = local_BNHCM[..., -1, :]
    upto_BNHM = _log_cumulative_by_doubling(
        torch.cat([state.log_norm_BHM[:, None], ends_BNHM], dim=1).transpose(1, 2),
        F.pad(segment_BNC[..., -1], (1, 0))[:, None],
    ).transpose(1, 2)
    before_BNHM, after_BNHM = upto_BNHM[:, :-1], upto_BNHM[:, 1:]
    gate_in_BNHM = -before_BNHM
    continues_BN1C1 = (segment_BNC == segment_in_BN[..., None])[:, :, None, :, None]
    log_norm_BNHCM = torch.where(
        continues_BN1C1, torch.logaddexp(local_BNHCM, -gate_in_BNHM[..., None, :]), local_BNHCM
    )
    chunks = Chunks(
        p_BNHCM,
        bounded_exp((k_BNHCM - log_norm_BNHCM).to(p_BNHCM.dtype)) * (k_BNHCM > EMPTY / 2),
        v_BNHCV,
        -log_norm_BNHCM,
        gate_in_BNHM,
        before_BNHM - after_BNHM,
        segment_BNC,
        segment_in_BN,
    )
    y_BNHCV, mean_BHMV = gated_chunks(
        chunks, state.mean_BHMV, None if scaled is None else _within(chunks, k_BNHCM, log_norm_BNHCM, scaled)
    )
    return y_BNHCV, LatteState(after_BNHM[:, -1], mean_BHMV)


class Scaled(NamedTuple):
    """The keys of each chunk on one scale, the logit of its first key: with ordinary logits, weights are then products
    of two factors. What doesn't fit takes the long way, token by token, so that a later key changes no bit."""

    scale_BNH1M: Tensor
    sum_BNHCM: Tensor  # running sum of e^(k - scale), restarting with each document
    fits_BNHCM: Tensor | None  # tokens for which all factors are in range; None: all of them


def _scale(k_BNHCM: Tensor, segment_BNC: Tensor) -> Scaled:
    real_BNHCM = k_BNHCM.detach() > EMPTY / 2
    first_BNH1M = real_BNHCM.to(torch.uint8).argmax(dim=-2, keepdim=True)
    scale_BNH1M = k_BNHCM.detach().gather(-2, first_BNH1M)
    above_BNHCM = k_BNHCM - scale_BNH1M
    weight_BNHCM = bounded_exp(above_BNHCM, COMMON_RANGE) * real_BNHCM
    sum_BNHCM = seen_within(segment_BNC)[:, :, None].to(k_BNHCM.dtype) @ weight_BNHCM
    with torch.no_grad():
        high = above_BNHCM > COMMON_RANGE
        low = (sum_BNHCM > 0) & (sum_BNHCM < math.exp(-COMMON_RANGE))
        misfits = high | low
        fits_BNHCM = ~(low | high.to(torch.uint8).cummax(dim=-2).values.bool()) if bool(misfits.any()) else None
    return Scaled(scale_BNH1M, sum_BNHCM, fits_BNHCM)


def _within(x: Chunks, k_BNHCM: Tensor, log_norm_BNHCM: Tensor, scaled: Scaled) -> Tensor:
    """Outputs from keys of the same chunk: p e^{scale - a_t} times e^{k_s - scale}."""
    narrow = x.q_BNHCK.dtype
    reach_BNHCM = x.q_BNHCK * bounded_exp((scaled.scale_BNH1M - log_norm_BNHCM).to(narrow), COMMON_RANGE + 1)
    weight_BNHCM = bounded_exp((k_BNHCM - scaled.scale_BNH1M).to(narrow), COMMON_RANGE) * (k_BNHCM > EMPTY / 2)
    y_BNHCV = (reach_BNHCM @ weight_BNHCM.mT * seen_within(x.segment_BNC)[:, :, None]) @ x.v_BNHCV
    if scaled.fits_BNHCM is None:
        return y_BNHCV
    return torch.where(scaled.fits_BNHCM.all(dim=-1, keepdim=True), y_BNHCV, within_channels(x))


def _log_cumulative(k_BNHCM: Tensor, segment_BNC: Tensor, scaled: Scaled | None) -> Tensor:
    """log of the running sum of e^k over the tokens of a chunk, restarting with each document."""
    if scaled is None:
        return _log_cumulative_by_doubling(k_BNHCM, segment_BNC[:, :, None])
    some = scaled.sum_BNHCM > 0
    log_BNHCM = torch.where(some, scaled.scale_BNH1M + torch.where(some, scaled.sum_BNHCM, 1.0).log(), EMPTY)
    if scaled.fits_BNHCM is None:
        return log_BNHCM
    return torch.where(scaled.fits_BNHCM, log_BNHCM, _log_cumulative_by_doubling(k_BNHCM, segment_BNC[:, :, None]))


def _log_cumulative_by_doubling(k_CM: Tensor, segment_C: Tensor) -> Tensor:
    """The same over the axis before the last, for any logits: no sum ever meets a later one's scale."""
    C = k_CM.shape[-2]
    distance = 1
    while distance < C:
        earlier = F.pad(k_CM[..., :-distance, :], (0, 0, distance, 0), value=EMPTY)
        same = F.pad(segment_C[..., distance:] == segment_C[..., :-distance], (distance, 0))
        k_CM = torch.where(same[..., None], torch.logaddexp(k_CM, earlier), k_CM)
        distance *= 2
    return k_CM


@exact
def bidirectional_latte(
    p_BTHM: Tensor,
    k_BTHM: Tensor,
    v_BTHV: Tensor,
    *,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Bidirectional Latte, equation (6): y_t = sum_l p(l|t) sum_s p(s|l) v_s over the real tokens of t's document.

    Shapes: p = p(l|t) and the key logits k (B, T, H, M), values v (B, T, H, V); ``segments`` (B, T) numbers the
    documents of each row. Padding is taken out before the softmax, never afterwards.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, or no tokens.
    """
    axes = Axes("bidirectional_latte")
    axes.bind("p", p_BTHM, "BTHM")
    axes.bind("k", k_BTHM, "BTHM")
    axes.bind("v", v_BTHV, "BTHV")
    axes.flags("mask", mask)
    axes.ids("segments", segments)
    if choose_backend("bidirectional_latte", backend, p_BTHM) == "reference":
        return bidirectional_latte_reference(p_BTHM, k_BTHM, v_BTHV, mask, segments)
    dtype = compute_dtype(p_BTHM)
    p, k, v = (x.to(dtype) for x in (p_BTHM, k_BTHM, v_BTHV))
    if mask is not None:
        k, v = torch.where(mask[..., None, None], k, EMPTY), torch.where(mask[..., None, None], v, 0.0)
    # Shifting the logits of a document changes nothing: by its own maximum, which carries no gradient.
    if segments is None:
        share_BTHM = k.softmax(dim=1)
    else:
        starts_BT = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
        index_BTHM = starts_BT.long().cumsum(1)[..., None, None].expand_as(k)
        top_BTHM = torch.full_like(k, EMPTY).scatter_reduce(1, index_BTHM, k.detach(), "amax")
        weight_BTHM = (k - top_BTHM.gather(1, index_BTHM)).exp()
        norm_BTHM = torch.zeros_like(k).scatter_add(1, index_BTHM, weight_BTHM)
        share_BTHM = weight_BTHM / norm_BTHM.gather(1, index_BTHM)
    return document_attention(p, share_BTHM, v, mask=mask, segments=segments).to(v_BTHV.dtype)


def bidirectional_latte_reference(
    p_BTHM: Tensor, k_BTHM: Tensor, v_BTHV: Tensor, mask: Tensor | None, segments: Tensor | None
) -> Tensor:
    """Equation (6) as written: a softmax over s for every t and l. Quadratic in T."""
    p, k, v = (x.to(compute_dtype(x)) for x in (p_BTHM, k_BTHM, v_BTHV))
    seen_BTS = whole_document(p, mask, segments)
    weights_BTSHM = torch.where(seen_BTS[..., None, None], k[:, None], EMPTY).softmax(dim=2)  # p(s|l)
    y_BTHV = torch.einsum("bthm,btshm,bshv->bthv", p, weights_BTSHM, v)
    return zero_padding(y_BTHV, mask).to(v_BTHV.dtype)
