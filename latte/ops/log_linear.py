"""Log-linear attention (Guo et al., 2025): the past in blocks of doubling size, each read with a weight of its own.

    y_t = sum_l w_t^(l) q_t^T S_t^(l)        S_t^(l) = sum_{s at level l from t} e^{g_{s+1} + ... + g_t} k_s v_s^T

t and s are places in the document, from 0. A token is at level 0 from itself; an earlier one is at level 1 + i, where
i is the highest bit in which t and s differ. So level 1 + i is one block of 2^i tokens if bit i of t is set and empty
otherwise: after n tokens there is one block for each bit of n (a Fenwick tree), and reading a token is binary addition
of 1. All weights 1 give ``decay_attention``.

With a key to erase, a_t, every S^(l) follows the delta rule: what it reads along a_t is taken from it along k_t. All
weights 1 then give ``delta_attention``.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.modes import values_hidden
from latte.ops.gated import BLOCK, Outputs, chunk_size, pad_tokens, seen_within, to_chunks
from latte.ops.nonfinite import contained
from latte.ops.numbers import FORGET, compute_dtype, exp_where, wide_dtype
from latte.ops.registry import Draw, Example, operation
from latte.ops.wy import ChunkMaps, chunk_maps
from latte.shapes import Axes
from latte.state import State, require_state, state
from latte.tokens import Tokens, require_tokens


@state
class LogLinearState(State):
    """One faded sum of k v^T for each bit of the number of tokens read: at index i the block of 2^i tokens.

    Where a row's bit is 0, there are zeros. There are as many blocks as the longest document of the batch needs.
    """

    levels_BLHKV: Tensor

    free = "L"
    growth = "log"

    @classmethod
    def empty(cls, like_BT: Tensor, heads: int, key_width: int, value_width: int) -> LogLinearState:
        shape = (like_BT.shape[0], 0, heads, key_width, value_width)
        return cls(torch.zeros(shape, dtype=compute_dtype(like_BT), device=like_BT.device))


def log_linear_attention_reference(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    weights_BTHL: Tensor,
    erase_BTHK: Tensor | None,
    state: LogLinearState,
    tokens: Tokens,
) -> tuple[Tensor, LogLinearState]:
    """The recurrence token by token: read own pair and all blocks, then add 1 to the count, with its carries."""
    q, k, v, gate, weights, erase = _prepare(q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, weights_BTHL, erase_BTHK, tokens)
    before, after = state.levels_BLHKV.shape[1], _levels_after(state, weights, tokens)
    most = after if values_hidden(q) else max(before, _longest(tokens).bit_length())
    levels_BLHKV = F.pad(state.levels_BLHKV, (0, 0) * 3 + (0, most - before))
    index_L = torch.arange(most, device=q.device)
    read = min(most, weights.shape[-1] - 1)
    # The bit that turns from 0 to 1: the lowest of the new count. At padding none does.
    count_BT = tokens.count_BT
    carry_BT = tokens.fill_padding(_bit_length(count_BT & -count_BT) - 1, -1)
    outputs = []
    for t in range(q.shape[1]):
        if tokens.reset is not None:
            levels_BLHKV = torch.where(tokens.reset[:, t, None, None, None, None], 0.0, levels_BLHKV)
        faded_BLHKV = gate[:, t, None, :, None, None].exp() * levels_BLHKV
        if erase is not None:
            faded_BLHKV = faded_BLHKV - k[:, t, None, :, :, None] * (erase[:, t, None, :, None] @ levels_BLHKV)
        levels_BLHKV = faded_BLHKV
        own_B1HKV = (k[:, t, :, :, None] * v[:, t, :, None, :])[:, None]
        seen_BLHKV = torch.cat([own_B1HKV, levels_BLHKV[:, :read]], dim=1)
        outputs.append(torch.einsum("bhk,blhkv,bhl->bhv", q[:, t], seen_BLHKV, weights[:, t, :, : 1 + read]))
        carry_BL = carry_BT[:, t, None] - index_L
        below_BLHKV, here_BLHKV = (flags[..., None, None, None] for flags in (carry_BL > 0, carry_BL == 0))
        joined_B1HKV = own_B1HKV + torch.where(below_BLHKV, levels_BLHKV, 0.0).sum(1, keepdim=True)
        levels_BLHKV = torch.where(here_BLHKV, joined_B1HKV, torch.where(below_BLHKV, 0.0, levels_BLHKV))
    y_BTHV = tokens.zero_padding(torch.stack(outputs, dim=1)).to(v_BTHV.dtype)
    return y_BTHV, LogLinearState(levels_BLHKV[:, :after].contiguous())


class Occupied(NamedTuple):
    """Which blocks hold something in some row, around one chunk of tokens: bit i for the block of 2^i tokens."""

    before: int
    added: int  # blocks after the chunk that tokens of the chunk are in
    after: int
    tops: tuple[int, ...] | None  # of each row, the highest bit of its count that the chunk changes; None: not known


class Chunks(NamedTuple):
    """Chunks of C tokens, all those of a block of tokens as rows, and where the documents stand that they continue."""

    q_NHCK: Tensor
    k_NHCK: Tensor
    v_NHCV: Tensor
    gate_NHC: Tensor
    weights_NHCL: Tensor
    erase_NHCK: Tensor | None
    count_NC: Tensor
    segment_NC: Tensor
    real_NC: Tensor
    count_in_N: Tensor
    segment_in_N: Tensor


@contained(numbers=(1, 2, 5), logits=(3,))
def log_linear_attention_chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    weights_BTHL: Tensor,
    erase_BTHK: Tensor | None,
    state: LogLinearState,
    tokens: Tokens,
) -> tuple[Tensor, LogLinearState]:
    """Matrix products over chunks of the call, wherever these lie in their documents' trees.

    Within a chunk all pairs are formed, each with the weight of its level, for many chunks at once; of what stands
    before, the blocks are read chunk after chunk, O(log T) of them in one product. Blocks that are empty in all rows
    are skipped. Time T log T; without gradients, chunk after chunk, in memory for one.
    """
    q, k, v, gate, *rest = _prepare(q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, weights_BTHL, erase_BTHK, tokens)
    inputs = (q, k, v, gate[..., None], *rest)
    C = chunk_size(tokens.length)
    plan = _plan(state, weights_BTHL, tokens, C)
    blocks = {i: block for i, block in enumerate(state.levels_BLHKV.unbind(1)) if plan[0].before >> i & 1}
    entered = [tokens.start_B, torch.zeros_like(tokens.segment_BT[:, 0])]
    outputs = Outputs(v_BTHV, v.dtype)
    # By split: the gradient of slices, one by one, would fill a whole row with zeros for each of them.
    span = BLOCK if torch.is_grad_enabled() else C
    parts = -(-tokens.length // span)
    columns: list[Any] = [[None] * parts if x is None else x.split(span, dim=1) for x in inputs]
    columns += [x.split(span, dim=1) for x in (tokens.count_BT, tokens.segment_BT, tokens.real_BT)]
    for *part, start in zip(*columns, range(0, len(plan), span // C), strict=True):
        x, entered = _cut(part, C, entered)
        y_BNHCV, blocks = _read_chunks(x, blocks, plan[start : start + span // C])
        outputs.append(y_BNHCV, part[0].shape[1])
    zeros_BHKV = state.levels_BLHKV[:, :0].sum(1)
    levels = [blocks.get(i, zeros_BHKV) for i in range(plan[-1].after.bit_length())]
    levels_BLHKV = torch.stack(levels, dim=1) if levels else state.levels_BLHKV[:, :0]
    return tokens.zero_padding(outputs.joined()).to(v_BTHV.dtype), LogLinearState(levels_BLHKV)


def _cut(part: list[Any], C: int, entered: list[Tensor]) -> tuple[Chunks, list[Tensor]]:
    """Tokens (B, T, ...) as chunks (B T/C, ...), and counts and segments of the last tokens.

    A last chunk is filled up with padding: keys and gates of 0, which add and fade nothing.
    """
    *tensors, count_BT, segment_BT, real_BT = part
    extra = -count_BT.shape[1] % C
    rows = [None if x is None else to_chunks(pad_tokens(x, extra), C) for x in tensors]
    flags = [torch.cat([x, x[:, -1:].expand(-1, extra)], dim=1).unflatten(1, (-1, C)) for x in (count_BT, segment_BT)]
    flags.append(F.pad(real_BT, (0, extra)).unflatten(1, (-1, C)))
    last = [x[..., -1] for x in flags[:2]]
    before = [torch.cat([x[:, None], y[:, :-1]], dim=1).flatten() for x, y in zip(entered, last, strict=True)]
    q, k, v, gate, weights, erase = (None if x is None else x.flatten(0, 1) for x in rows)
    assert gate is not None
    chunks = Chunks(q, k, v, gate[..., 0], weights, erase, *(x.flatten(0, 1) for x in flags), *before)  # type: ignore[arg-type]
    return chunks, [x[:, -1] for x in last]


def _read_chunks(x: Chunks, blocks: dict[int, Tensor], plan: list[Occupied]) -> tuple[Tensor, dict[int, Tensor]]:
    """Outputs (B, chunks, H, C, V) of a block of tokens, and the blocks after it."""
    x = x._replace(gate_NHC=x.gate_NHC.clamp_min(FORGET))
    seen_NCC = seen_within(x.segment_NC)
    place_NC = x.count_NC - 1
    maps = _decay_maps(x, seen_NCC) if x.erase_NHCK is None else _delta_maps(x)
    # Within a chunk the weight of every pair is that of its level.
    level_NCC = torch.where(seen_NCC, _bit_length(place_NC[:, :, None] ^ place_NC[:, None, :]), 0)
    y_NHCV = (maps.weights * _take(x.weights_NHCL, level_NCC[:, None])) @ x.v_NHCV

    # A block of the n tokens before is seen as a whole: at its own level, or with all smaller ones at that of the
    # highest bit in which a token's place differs from n. After a document of full length no token follows.
    most = min(max(occupied.before for occupied in plan).bit_length(), x.weights_NHCL.shape[-1] - 1)
    reads_NC = (x.segment_NC == x.segment_in_N[:, None]) & x.real_NC
    level_NC = torch.where(reads_NC, _bit_length(place_NC ^ x.count_in_N[:, None]), 0)
    own_L = torch.arange(1, 1 + most, device=place_NC.device)
    weights_NHCL = _take(x.weights_NHCL, torch.maximum(level_NC[..., None], own_L)[:, None])

    # The block of the tree that a token of a chunk is in afterwards.
    target_NC = _bit_length(place_NC ^ x.count_NC[:, -1:]) - 1
    top_N = _bit_length(x.count_in_N ^ x.count_NC[:, -1]) - 1
    together = (y_NHCV, weights_NHCL, maps.queries, maps.keys, maps.carry, x.v_NHCV, target_NC, top_N)
    columns = (part.unflatten(0, (-1, len(plan))).unbind(1) for part in together)
    outputs = []
    for y, weights, queries, keys, carry, v, target_BC, top_B, occupied in zip(*columns, plan, strict=True):
        carried: dict[int, Tensor] = {}
        if blocks:
            held, V = sorted(blocks), v.shape[-1]
            side_by_side = torch.cat([blocks[i] for i in held], dim=-1)
            read = [i for i in held if i < most]
            if read:
                each = (queries @ side_by_side[..., : len(read) * V]).unflatten(-1, (len(read), V))
                own = weights.unbind(-1)
                y = y + (torch.stack([own[i] for i in read], dim=-1)[..., None] * each).sum(-2)
            after = carry * side_by_side if x.erase_NHCK is None else carry @ side_by_side
            carried = dict(zip(held, after.split(V, dim=-1), strict=True))
        outputs.append(y)
        blocks = _add_chunk(carried, keys, v, target_BC, top_B[:, None, None, None], occupied)
    return torch.stack(outputs, dim=1), blocks


def _decay_maps(x: Chunks, seen_NCC: Tensor) -> ChunkMaps:
    """Chunks as linear maps without erasing; what is left of a state is one number a head, (N, H, 1, 1)."""
    # The cumulative decay, in float64 and within each document alone, as in decay_attention.
    wide = x.gate_NHC.to(wide_dtype(x.gate_NHC.device))
    total_NHC = (seen_NCC[:, None].to(wide.dtype) @ wide[..., None])[..., 0]
    in_N1, last_N1 = x.segment_in_N[:, None], x.segment_NC[:, -1:]
    reach_NHC = exp_where(x.q_NHCK, (x.segment_NC == in_N1)[:, None], total_NHC)
    fade_NHCC = exp_where(x.q_NHCK, seen_NCC[:, None], total_NHC[..., :, None] - total_NHC[..., None, :])
    kept_NHC = exp_where(x.q_NHCK, (x.segment_NC == last_N1)[:, None], total_NHC[..., -1:] - total_NHC)
    carry_NH = exp_where(x.q_NHCK, last_N1 == in_N1, total_NHC[..., -1])
    return ChunkMaps(
        x.q_NHCK * reach_NHC[..., None],
        x.q_NHCK @ x.k_NHCK.transpose(-1, -2) * fade_NHCC,
        x.k_NHCK * kept_NHC[..., None],
        carry_NH[..., None, None],
    )


def _delta_maps(x: Chunks) -> ChunkMaps:
    """Chunks as linear maps of the delta rule."""
    assert x.erase_NHCK is not None
    gate = x.gate_NHC[..., None]
    return chunk_maps(x.q_NHCK, x.k_NHCK, x.erase_NHCK, -x.k_NHCK, gate, x.segment_NC, x.segment_in_N)


def _add_chunk(
    carried: dict[int, Tensor], keys: Tensor, v: Tensor, target_BC: Tensor, top_B111: Tensor, occupied: Occupied
) -> dict[int, Tensor]:
    """The blocks after a chunk: binary addition of its number of tokens, with carries.

    ``carried`` is what the chunk left of the blocks before. From n to n' tokens, blocks above the highest bit that
    changes stay, and those below it join in the block there. Tokens of the chunk are where a token at place n' sees
    them, in one block if the chunk is aligned with the tree.
    """
    after: dict[int, Tensor] = {}
    below: Tensor | None = None
    for i in range(occupied.after.bit_length()):
        block = carried.get(i)
        if occupied.after >> i & 1:
            terms = [
                _of_rows(block, top_B111 < i, occupied.tops, range(-1, i)),
                _of_rows(below, top_B111 == i, occupied.tops, range(i, i + 1)),
            ]
            if occupied.added >> i & 1:
                alone = occupied.added == 1 << i
                there = keys if alone else keys * (target_BC == i)[:, None, :, None]
                terms.append(there.transpose(-1, -2) @ v)
            found = [term for term in terms if term is not None]
            after[i] = sum(found[1:], found[0]) if found else torch.zeros_like(keys.transpose(-1, -2) @ v)
        if block is not None:
            below = block if below is None else below + block
    return after


def _of_rows(block: Tensor | None, flags_B111: Tensor, tops: Sequence[int] | None, wanted: range) -> Tensor | None:
    """A block in the rows with a flag, 0 in others; None where no row has one. A row has one if its top is wanted."""
    known = None if tops is None else {top in wanted for top in tops}
    if block is None or known == {False}:
        return None
    return block if known == {True} else flags_B111 * block


def _plan(state: LogLinearState, weights: Tensor, tokens: Tokens, size: int) -> list[Occupied]:
    """Which blocks are occupied around each chunk. A graph that is compiled can't look: there all are that may be."""
    stops = [min(start + size, tokens.length) for start in range(0, tokens.length, size)]
    if values_hidden(weights):
        room = [(1 << _room(state, weights, stop)) - 1 for stop in (0, *stops)]
        return [Occupied(before, after, after, None) for before, after in itertools.pairwise(room)]

    def look() -> list[Occupied]:
        count_BN, segment_BN = (x[:, [stop - 1 for stop in stops]] for x in (tokens.count_BT, tokens.segment_BT))
        before_BN = torch.cat([tokens.start_B[:, None], count_BN[:, :-1]], dim=1)
        kept_BN = torch.where(segment_BN == F.pad(segment_BN[:, :-1], (1, 0)), before_BN, 0)
        plan = []
        for before, kept, after in zip(*(x.T.tolist() for x in (before_BN, kept_BN, count_BN)), strict=True):
            changed = [new & (1 << (old ^ new).bit_length()) - 1 for old, new in zip(kept, after, strict=True)]
            bits = [functools.reduce(operator.or_, counts) for counts in (before, changed, after)]
            tops = tuple((old ^ new).bit_length() - 1 for old, new in zip(before, after, strict=True))
            plan.append(Occupied(bits[0], bits[1], bits[2], tops))
        return plan

    return tokens.shared(("log-linear plan", size), look)


def _room(state: LogLinearState, weights: Tensor, columns: int) -> int:
    """The most levels that there can be after so many columns, and that the weights allow."""
    before = int(state.levels_BLHKV.shape[1])
    return min(((1 << before) - 1 + columns).bit_length(), weights.shape[-1])


def _longest(tokens: Tokens) -> int:
    """The most tokens of a document that a row has read at any column."""
    return tokens.shared("longest document", lambda: int(tokens.count_BT.max()))


def _levels_after(state: LogLinearState, weights: Tensor, tokens: Tokens) -> int:
    """How many levels the state after these tokens has."""
    if values_hidden(weights):
        return _room(state, weights, tokens.length)
    return tokens.shared("levels after", lambda: int(tokens.count_B.max()).bit_length())


def _bit_length(number: Tensor) -> Tensor:
    """1 + the index of the highest bit; 0 for 0 and what is below (the place of padding before any token)."""
    return torch.bucketize(number, 2 ** torch.arange(62, device=number.device), right=True)


def _take(weights_NHCL: Tensor, index_N1CM: Tensor) -> Tensor:
    """Weights of the levels ``index``: (N, H, C, M)."""
    return weights_NHCL.gather(-1, index_N1CM.expand(-1, weights_NHCL.shape[1], -1, -1))


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, weights: Tensor, erase: Tensor | None, tokens: Tokens
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Working dtype, and padding that neither fades, erases nor adds."""
    dtype = compute_dtype(q)
    k, v, gate = (tokens.fill_padding(x.to(dtype), 0.0) for x in (k, v, gate))
    erase = None if erase is None else tokens.fill_padding(erase.to(dtype), 0.0)
    return q.to(dtype), k, v, gate, weights.to(dtype), erase


def _example(draw: Draw) -> Example:
    B, T, H, K, V, L = draw.B, draw.T, 4, 16, 24, 2 + draw.T.bit_length()
    q, k, v, weights = (draw.normal(B, T, H, width) for width in (K, K, V, L))
    return (q, k, v, -draw.normal(B, T, H).abs(), weights), {}


@operation(reference=log_linear_attention_reference, chunked=log_linear_attention_chunked, example=_example)
def log_linear_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    log_decay_BTH: Tensor,
    level_weights_BTHL: Tensor,
    erase_BTHK: Tensor | None = None,
    *,
    state: State | None = None,
    tokens: Tokens | None = None,
) -> tuple[Any, ...]:
    """y_t = sum_{s<=t} w_t^(l(t,s)) (q_t . k_s) e^{g_{s+1} + ... + g_t} v_s, with the level l of s from t as above.

    Shapes: q and k (B, T, H, K), v (B, T, H, V), log_decay (B, T, H), at most 0, level_weights (B, T, H, L), for
    documents of at most 2^(L-1) tokens; ``erase`` (B, T, H, K) or None. Returns y (B, T, H, V), 0 at padding, and the
    :class:`LogLinearState`.

    Raises:
        ValueError: shapes, dtypes or devices that do not agree, no tokens, a document that is too long, or a state of
            something else or without the number of tokens it has read.
    """
    axes = Axes("log_linear_attention")
    axes.bind("q", q_BTHK, "BTHK")
    axes.bind("k", k_BTHK, "BTHK")
    axes.bind("v", v_BTHV, "BTHV")
    axes.bind("log_decay", log_decay_BTH, "BTH")
    sizes = axes.bind("level_weights", level_weights_BTHL, "BTHL")
    if erase_BTHK is not None:
        axes.bind("erase", erase_BTHK, "BTHK")
    tokens = require_tokens("log_linear_attention", tokens, q_BTHK, state)
    empty = LogLinearState.empty(q_BTHK, sizes["H"], sizes["K"], sizes["V"])
    before = require_state("log_linear_attention", state, empty)
    if not values_hidden(q_BTHK):
        _check_lengths(before, sizes["L"], tokens)
    return q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, level_weights_BTHL, erase_BTHK, before, tokens


def _check_lengths(state: LogLinearState, weights: int, tokens: Tokens) -> None:
    """Raise ValueError unless the state has the blocks of the tokens it has read, and the weights are enough."""
    longest, levels = _longest(tokens), state.levels_BLHKV.shape[1]
    if longest > 2 ** (weights - 1):
        raise ValueError(
            f"log_linear_attention: a document has {longest} tokens, "
            f"expected at most {2 ** (weights - 1)} with {weights} level weights"
        )
    read = tokens.shared("most tokens read", lambda: int(tokens.start_B.max()))
    if read >> levels:
        raise ValueError(
            f"log_linear_attention: state has {levels} levels, "
            f"expected at least {read.bit_length()} after {read} tokens"
        )
