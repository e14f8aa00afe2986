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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from latte.modes import values_hidden
from latte.ops.gated import CHUNK, Outputs, seen_within
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


class Chunk(NamedTuple):
    """Tokens of one chunk, and where the documents stand that it continues."""

    q_BHCK: Tensor
    k_BHCK: Tensor
    v_BHCV: Tensor
    gate_BHC: Tensor
    weights_BHCL: Tensor
    erase_BHCK: Tensor | None
    count_BC: Tensor
    segment_BC: Tensor
    real_BC: Tensor
    count_in_B: Tensor
    segment_in_B: Tensor


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

    Within a chunk all pairs are formed, each with the weight of its level; of what stands before, the blocks are read,
    O(log T) of them. Blocks that are empty in all rows are skipped, so rows that start together with their documents
    cost little more than without levels. Time T log T; without gradients, memory as for one chunk.
    """
    *inputs, erase = _prepare(q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, weights_BTHL, erase_BTHK, tokens)
    q, k, v, gate, weights = (x.transpose(1, 2) for x in inputs if x is not None)
    erase = None if erase is None else erase.transpose(1, 2)
    plan = _plan(state, weights, tokens)
    blocks = {i: block for i, block in enumerate(state.levels_BLHKV.unbind(1)) if plan[0].before >> i & 1}
    entered = [tokens.start_B, torch.zeros_like(tokens.segment_BT[:, 0])]
    outputs = Outputs(v_BTHV, v.dtype)
    # By split: the gradient of slices, one by one, would fill a whole row with zeros for each of them.
    chunks = -(-tokens.length // CHUNK)
    columns: list[Any] = [
        [None] * chunks if x is None else x.split(CHUNK, dim=2) for x in (q, k, v, gate, weights, erase)
    ]
    columns += [x.split(CHUNK, dim=1) for x in (tokens.count_BT, tokens.segment_BT, tokens.real_BT)]
    for *tensors, occupied in zip(*columns, plan, strict=True):
        chunk = Chunk(*tensors, *entered)
        y_BHCV, blocks = _read_chunk(chunk, blocks, occupied)
        outputs.append(y_BHCV[:, None], y_BHCV.shape[2])
        entered = [chunk.count_BC[:, -1], chunk.segment_BC[:, -1]]
    zeros_BHKV = state.levels_BLHKV[:, :0].sum(1)
    levels = [blocks.get(i, zeros_BHKV) for i in range(plan[-1].after.bit_length())]
    levels_BLHKV = torch.stack(levels, dim=1) if levels else state.levels_BLHKV[:, :0]
    return tokens.zero_padding(outputs.joined()).to(v_BTHV.dtype), LogLinearState(levels_BLHKV)


def _read_chunk(x: Chunk, blocks: dict[int, Tensor], occupied: Occupied) -> tuple[Tensor, dict[int, Tensor]]:
    """Outputs (B, H, C, V) of one chunk, and the blocks after it."""
    x = x._replace(gate_BHC=x.gate_BHC.clamp_min(FORGET))
    seen_BCC = seen_within(x.segment_BC)
    # The cumulative decay, in float64 and within each document alone, as in decay_attention.
    wide = x.gate_BHC.to(wide_dtype(x.gate_BHC.device))
    total_BHC = (seen_BCC[:, None].to(wide.dtype) @ wide[..., None])[..., 0]
    place_BC = x.count_BC - 1
    maps = _decay_maps(x, seen_BCC, total_BHC) if x.erase_BHCK is None else _delta_maps(x)
    # Within the chunk the weight of every pair is that of its level.
    level_BCC = torch.where(seen_BCC, _bit_length(place_BC[:, :, None] ^ place_BC[:, None, :]), 0)
    y_BHCV = (maps.weights * _take(x.weights_BHCL, level_BCC[:, None])) @ x.v_BHCV

    # A block of the n tokens before is seen as a whole: at its own level, or with all smaller ones at that of the
    # highest bit in which a token's place differs from n.
    reads_BC = (x.segment_BC == x.segment_in_B[:, None]) & x.real_BC
    level_BC = _bit_length(place_BC ^ x.count_in_B[:, None])
    for i, block_BHKV in blocks.items():
        if i + 1 == x.weights_BHCL.shape[-1]:
            continue  # a document of full length: no token follows
        index_B1C = torch.where(reads_BC, level_BC.clamp(min=i + 1), 0)[:, None]
        weight_BHC = _take(x.weights_BHCL, index_B1C[..., None])[..., 0]
        y_BHCV = y_BHCV + weight_BHC[..., None] * (maps.queries @ block_BHKV)
    return y_BHCV, _add_chunk(x, blocks, occupied, maps, place_BC)


def _decay_maps(x: Chunk, seen_BCC: Tensor, total_BHC: Tensor) -> ChunkMaps:
    """The chunk as a linear map without erasing; what is left of a state is one number a head, (B, H, 1, 1)."""
    in_B1, last_B1 = x.segment_in_B[:, None], x.segment_BC[:, -1:]
    reach_BHC = exp_where(x.q_BHCK, (x.segment_BC == in_B1)[:, None], total_BHC)
    fade_BHCC = exp_where(x.q_BHCK, seen_BCC[:, None], total_BHC[..., :, None] - total_BHC[..., None, :])
    kept_BHC = exp_where(x.q_BHCK, (x.segment_BC == last_B1)[:, None], total_BHC[..., -1:] - total_BHC)
    carry_BH = exp_where(x.q_BHCK, last_B1 == in_B1, total_BHC[..., -1])
    return ChunkMaps(
        x.q_BHCK * reach_BHC[..., None],
        x.q_BHCK @ x.k_BHCK.transpose(-1, -2) * fade_BHCC,
        x.k_BHCK * kept_BHC[..., None],
        carry_BH[..., None, None],
    )


def _delta_maps(x: Chunk) -> ChunkMaps:
    """The chunk as a linear map of the delta rule."""
    assert x.erase_BHCK is not None
    gate = x.gate_BHC[..., None]
    return chunk_maps(x.q_BHCK, x.k_BHCK, x.erase_BHCK, -x.k_BHCK, gate, x.segment_BC, x.segment_in_B)


def _add_chunk(
    x: Chunk, blocks: dict[int, Tensor], occupied: Occupied, maps: ChunkMaps, place_BC: Tensor
) -> dict[int, Tensor]:
    """The blocks after a chunk: binary addition of its number of tokens, with carries.

    From n to n' tokens, blocks above the highest bit that changes stay, and those below it join in the block there.
    Tokens of the chunk are where a token at place n' sees them.
    """
    count_B = x.count_BC[:, -1]
    top_B111 = _bit_length(x.count_in_B ^ count_B)[:, None, None, None] - 1
    target_BC = _bit_length(place_BC ^ count_B[:, None]) - 1
    after: dict[int, Tensor] = {}
    nothing = below_BHKV = x.q_BHCK.new_zeros(())
    for i in range(occupied.after.bit_length()):
        block_BHKV = blocks.get(i, nothing)
        if occupied.after >> i & 1:
            whole_BHKV = (top_B111 < i) * block_BHKV + (top_B111 == i) * below_BHKV
            if x.erase_BHCK is None:
                after[i] = maps.carry * whole_BHKV
            else:
                after[i] = maps.carry @ whole_BHKV.expand(*maps.carry.shape[:3], x.v_BHCV.shape[-1])
        if occupied.added >> i & 1:
            after[i] = after[i] + (maps.keys * (target_BC == i)[:, None, :, None]).transpose(-1, -2) @ x.v_BHCV
        below_BHKV = below_BHKV + block_BHKV
    return after


def _plan(state: LogLinearState, weights: Tensor, tokens: Tokens) -> list[Occupied]:
    """Which blocks are occupied around each chunk. A graph that is compiled can't look: there all are that may be."""
    stops = [min(start + CHUNK, tokens.length) for start in range(0, tokens.length, CHUNK)]
    if values_hidden(weights):
        room = [(1 << _room(state, weights, stop)) - 1 for stop in (0, *stops)]
        return [Occupied(before, after, after) for before, after in itertools.pairwise(room)]

    def look() -> list[Occupied]:
        count_BN, segment_BN = (x[:, [stop - 1 for stop in stops]] for x in (tokens.count_BT, tokens.segment_BT))
        before_BN = torch.cat([tokens.start_B[:, None], count_BN[:, :-1]], dim=1)
        kept_BN = torch.where(segment_BN == F.pad(segment_BN[:, :-1], (1, 0)), before_BN, 0)
        plan = []
        for before, kept, after in zip(*(x.T.tolist() for x in (before_BN, kept_BN, count_BN)), strict=True):
            changed = [new & (1 << (old ^ new).bit_length()) - 1 for old, new in zip(kept, after, strict=True)]
            plan.append(Occupied(*(functools.reduce(operator.or_, counts) for counts in (before, changed, after))))
        return plan

    return tokens.shared(("log-linear plan", CHUNK), look)


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


def _take(weights_BHCL: Tensor, index_B1CN: Tensor) -> Tensor:
    """Weights of the levels ``index``: (B, H, C, N)."""
    return weights_BHCL.gather(-1, index_B1CN.expand(-1, weights_BHCL.shape[1], -1, -1))


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
