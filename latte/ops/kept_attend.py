"""Attention of blocks of queries to the tokens that are kept for them, in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.ops import native
from latte.ops.gated import pad_tokens
from latte.ops.kept_selection import Selection
from latte.ops.kept_state import Far, Sources, take_heads
from latte.ops.nonfinite import none_of, nonfinite_tokens, spoiled, without
from latte.ops.numbers import EMPTY, bounded_exp, compute_dtype
from latte.ops.recompute import recomputed
from latte.ops.window import Reach, scaled_and_capped

#: Blocks of queries whose gathered keys are in memory at the same time.
BLOCKS = 16


def attend_to_selection(
    q_BTHK: Tensor,
    sources: Sources,
    selection: Selection,
    size: int,
    place_BT: Tensor,
    weight_G: Tensor | None,
    far: Far | None,
    reach: Reach,
) -> tuple[Tensor, Tensor]:
    """Means of kept values and logs of their normalisers; some blocks at a time, which keep nothing for gradients."""
    outputs = []
    for start in range(0, selection.source_BEGI.shape[1], BLOCKS):
        blocks = slice(start, start + BLOCKS)
        rows = slice(start * size, (start + BLOCKS) * size)
        source, first, last = (x[:, blocks] for x in selection[:3])
        some = Selection(source, first, last, selection.after_BGN)
        some_far = None if far is None else far._replace(query_BTHK=far.query_BTHK[:, rows])
        args = (q_BTHK[:, rows], sources, some, size, place_BT[:, rows], weight_G, some_far, reach)
        outputs.append(recomputed(_attend_in_blocks, *args))
    y_BTHV, log_norm_BTH = (torch.cat(parts, dim=1) for parts in zip(*outputs, strict=True))
    return y_BTHV, log_norm_BTH


def attend_natively(
    q_BTHK: Tensor,
    sources: Sources,
    selection: Selection,
    size: int,
    place_BT: Tensor,
    weight_G: Tensor | None,
    far: Far | None,
    reach: Reach,
) -> tuple[Tensor, Tensor]:
    """The same by one kernel, which reads keys and values where they are."""
    bias_BSG = None if weight_G is None else weight_G.to(sources.scores_BSG.dtype) * sources.scores_BSG
    return native.kept_attention(
        q_BTHK,
        sources.keys_BSGK,
        sources.values_BSGV,
        bias_BSG,
        None if far is None else far.query_BTHK,
        None if far is None else sources.back_BSGK,
        selection.source_BEGI,
        selection.last_BEGI,
        None if far is None else place_BT,
        None if far is None else sources.places_BSG,
        size,
        0 if far is None else far.reach,
        reach.scale,
        reach.softcap,
    )


def _attend_in_blocks(
    q_BTHK: Tensor,
    sources: Sources,
    selection: Selection,
    size: int,
    place_BT: Tensor,
    weight_G: Tensor | None,
    far: Far | None,
    reach: Reach,
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(q_BTHK)
    B, T = q_BTHK.shape[:2]
    _, n, G, entries = selection.source_BEGI.shape
    extra = -T % size
    index_BSG = selection.source_BEGI.transpose(2, 3).flatten(1, 2)

    def grouped(x_BTHK: Tensor) -> Tensor:  # (B, n, G, queries of the group's heads, K)
        x = pad_tokens(x_BTHK.to(dtype), extra).unflatten(1, (n, size)).unflatten(3, (G, -1))
        return x.permute(0, 1, 3, 4, 2, 5).flatten(3, 4)

    def gathered(x_BSGK: Tensor) -> Tensor:  # (B, n, G, entries, K)
        return take_heads(x_BSGK, index_BSG).to(dtype).unflatten(1, (n, entries)).transpose(2, 3)

    query_C = torch.arange(size, device=q_BTHK.device)[:, None]
    first, last = (x[..., None, :] for x in selection[1:3])
    seen = (query_C >= first) & (query_C <= last)  # (B, n, G, C, entries)
    v = gathered(sources.values_BSGV)
    flags = nonfinite_tokens(v.flatten(0, 2)).unflatten(0, (B, n, G))
    finite = none_of(flags)
    v = v if finite else without(flags, v)
    products = grouped(q_BTHK) @ gathered(sources.keys_BSGK).transpose(-1, -2)
    products = products.unflatten(3, (-1, size))  # (B, n, G, H/G, C, entries)
    if far is not None and sources.back_BSGK is not None:
        place = F.pad(place_BT, (0, extra)).unflatten(1, (n, size))[:, :, None, :, None]
        key_place = torch.gather(sources.places_BSG, 1, index_BSG).unflatten(1, (n, entries)).transpose(2, 3)
        beyond = (place - key_place[..., None, :] > far.reach)[:, :, :, None]
        others = grouped(far.query_BTHK) @ gathered(sources.back_BSGK).transpose(-1, -2)
        products = torch.where(beyond, others.unflatten(3, (-1, size)), products)
    logits = scaled_and_capped(products, reach)
    if weight_G is not None:
        scores = torch.gather(sources.scores_BSG, 1, index_BSG).unflatten(1, (n, entries)).transpose(2, 3)
        logits = logits + (weight_G[:, None].to(dtype) * scores)[..., None, None, :]
    seen = seen[:, :, :, None]
    top = torch.where(seen, logits.detach(), EMPTY).amax(dim=-1, keepdim=True)
    weights = torch.where(seen, bounded_exp(logits - top), 0.0)
    total = weights.sum(dim=-1, keepdim=True)
    some = total != 0  # NaN is not nothing
    norm = torch.where(some, top + torch.where(some, total, 1.0).log(), EMPTY)
    weights = weights / torch.where(some, total, 1.0)
    y = (weights.flatten(3, 4) @ v).unflatten(3, (-1, size))
    if not finite:
        touched = (seen[:, :, :, 0] & flags[..., None, :]).any(dim=-1)  # (B, n, G, C)
        y = spoiled(touched[:, :, :, None].expand(y.shape[:-1]), y)
    y_BTHV = y.permute(0, 1, 4, 2, 3, 5).flatten(1, 2).flatten(2, 3)
    log_norm_BTH = norm[..., 0].permute(0, 1, 4, 2, 3).flatten(1, 2).flatten(2, 3)
    return y_BTHV[:, :T], log_norm_BTH[:, :T]
