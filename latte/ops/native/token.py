"""One token through all layers of a model in one call, on the CPU: a function without gradients.

B batch, D width of the model, H heads, G key-value heads, V their width, I width inside the MLP.
"""

import ctypes
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.native import library
from latte.ops.native.decode import rotary_speeds


class Sizes(NamedTuple):
    """What all layers of a model have in common."""

    width: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate: int
    eps: float


class LayerWeights(NamedTuple):
    """The contiguous weights of one layer, in the order of the kernel's fields; None where a layer has none."""

    mixer_norm: Tensor
    v: Tensor
    q: Tensor | None
    k: Tensor | None
    gate_weight: Tensor | None  # of the RG-LRU, (2, H, W, W)
    gate_bias: Tensor | None
    decay: Tensor | None
    conv: Tensor | None  # taps of the convolution, (D, n)
    feed_norm: Tensor | None
    latent_q: Tensor
    latent_k: Tensor
    slot_bias: Tensor | None
    o: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


class LayerOptions(NamedTuple):
    """What else the kernel has to know of a layer; the last four are of its window."""

    latents: int  # of one head
    window: int | None
    sinks: int
    coupled: bool
    softcap: float | None
    power: float  # of the RG-LRU's gate
    frequencies: tuple[float, ...] | None
    scale: float
    stretch: float = 1.0
    exact_from: int = 0


#: What a layer's state holds, in the order of the kernel's fields: None where it has no such part. The first two are
#: the recurrence's value and count, or the convolution's last inputs and None.
LayerState = tuple[Tensor | None, ...]


def layer_fields(weights: LayerWeights, options: LayerOptions) -> tuple[int, ...]:
    """The part of a layer's block of fields that stays from token to token, as long as its weights stay in place."""
    windowed = options.window is not None
    speeds = rotary_speeds(options.frequencies) if windowed and options.frequencies is not None else None
    taps = 0 if weights.conv is None else weights.conv.shape[1]
    reals = (options.softcap or 0.0, options.power, options.scale, options.stretch)
    before, after = weights[:12], weights[12:]
    return (
        *(options.latents, options.window or 0, options.sinks, int(windowed), int(options.coupled)),
        *(options.exact_from, taps, *_as_fields(*reals)),
        *(library.pointer(tensor) for tensor in (*before, speeds, *after)),
    )


#: The parts of a layer's state that are rings, where token t is in slot t mod the number of slots; and its last part.
RINGS, COUNT = (4, 5), 8
#: Slots that a ring in a block has more than the window looks at: as many states in a row can share it.
SPARE = 16


class _Part(NamedTuple):
    """Where a part of a state lies in its block."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, block: Tensor) -> Tensor:
        return block[self.start : self.stop].view(self.dtype).view(self.shape)


class StateLayout:
    """Where the states of all layers lie in two blocks of memory, for states of the sizes of given ones.

    A token reads one block and writes another, each one allocation: making dozens of tensors takes as long as a layer.
    The windows' rings are apart, in a block that stays: with slots to spare, a token is written to one that the state
    before it does not look at.
    """

    ALIGNED = 64  # bytes: where every part starts

    def __init__(self, states: Sequence[LayerState]) -> None:
        self._bytes = {False: 0, True: 0}  # whether of the rings: how many
        self._parts = [
            [None if tensor is None else self._place(tensor, part in RINGS) for part, tensor in enumerate(state)]
            for state in states
        ]

    def _place(self, tensor: Tensor, ring: bool) -> _Part:
        shape, start = tuple(tensor.shape), self._bytes[ring]
        if ring and shape[1]:
            shape = (shape[0], shape[1] + SPARE, *shape[2:])
        stop = start + math.prod(shape) * tensor.element_size()
        self._bytes[ring] = -(-stop // self.ALIGNED) * self.ALIGNED
        return _Part(start, stop, tensor.dtype, shape)

    def offsets(self, layer: int) -> tuple[int, ...]:
        """Kernel arguments of a layer's state: where each part starts, -1 for none."""
        return tuple(-1 if part is None else part.start for part in self._parts[layer])

    def make(self, tokens: int = 1) -> Tensor:
        """Blocks (tokens, bytes) with anything in them, for all but the rings."""
        return torch.empty((tokens, self._bytes[False]), dtype=torch.uint8, device="cpu")

    def pack(self, states: Sequence[LayerState]) -> tuple[Tensor, Tensor]:
        """Blocks with a copy of these states: the rings' is the second."""
        block, rings = self.make()[0], torch.empty(self._bytes[True], dtype=torch.uint8, device="cpu")
        for parts, state in zip(self._parts, states, strict=True):
            for index, (part, tensor) in enumerate(zip(parts, state, strict=True)):
                if part is None or tensor is None:
                    continue
                if index not in RINGS:
                    part.of(block).copy_(tensor)
                elif tensor.shape[1]:
                    part.of(rings).scatter_(1, _slots(tensor, state[COUNT]), tensor)
        return block, rings

    def unpack(self, block: Tensor, rings: Tensor) -> list[LayerState]:
        """The states in these blocks, as tensors of their own."""
        states = []
        for parts in self._parts:
            state = [None if part is None or i in RINGS else part.of(block).clone() for i, part in enumerate(parts)]
            for index in RINGS:
                part = parts[index]
                if part is not None:
                    ring = part.of(rings)
                    seen = ring[:, : max(0, ring.shape[1] - SPARE)]
                    state[index] = ring.gather(1, _slots(seen, state[COUNT])) if seen.shape[1] else seen.clone()
            states.append(tuple(state))
        return states


def _slots(ring_BRGK: Tensor, count_B: Tensor | None) -> Tensor:
    """For every number in a ring of a state, the slot that it is in where the ring has slots to spare."""
    assert count_B is not None
    R = ring_BRGK.shape[1]
    last_B1 = count_B[:, None] - 1
    # The last token before `count` that belongs in each slot of the state's ring.
    token_BR = last_B1 - (last_B1 - torch.arange(R, device="cpu")) % R
    return (token_BR % (R + SPARE))[:, :, None, None].expand_as(ring_BRGK)


class TokenModel(NamedTuple):
    """Kernel arguments of a model, valid as long as its weights stay in place."""

    sizes: Sizes
    layers: list[tuple[int, ...]]  # of :func:`layer_fields`
    norm: Tensor  # after the last layer
    embedding: Tensor | None = None
    head: Tensor | None = None

    def table(self, layout: StateLayout) -> ctypes.Array:
        """The fields of all layers with where their states lie, as the kernel reads them."""
        fields = [field for index, fixed in enumerate(self.layers) for field in (*fixed, *layout.offsets(index))]
        return (ctypes.c_int64 * len(fields))(*fields)


def token_step(
    model: TokenModel, x: Tensor, table: ctypes.Array, before: Tensor, after: Tensor, rings: Tensor
) -> Tensor:
    """T tokens a row: logits (B, T, words), or without a head hidden states (B, T, D) after the last norm.

    x: ids (B, T), or without an embedding its rows (B, T, D), T up to ``SPARE``; table: of ``model``, for the layout of
    the blocks ``before``, which stays as it is, ``after`` (T of them), which the states after every token are written
    to, and ``rings``, where a token takes the place of one ``SPARE`` tokens behind the windows. What a token gives does
    not depend, to the last bit, on the other rows, nor on T. The caller has checked all: at one token that would cost
    more than the work.
    """
    sizes, layers, norm, embedding, head = model
    x = x.transpose(0, 1).contiguous()
    T, B = x.shape[:2]
    words = 0 if head is None else head.shape[0]
    y_TB = torch.empty((T, B, words or sizes.width), dtype=norm.dtype, device="cpu")
    given = (x.data_ptr(), 0, 0) if embedding is None else (0, x.data_ptr(), embedding.data_ptr())
    library.kernel("token")(
        (
            *(*library.header(norm), B, T, *sizes[:5], len(layers), *_as_fields(sizes.eps)),
            *(*given, norm.data_ptr(), words, library.pointer(head), y_TB.data_ptr()),
            *(ctypes.addressof(table), before.data_ptr(), after.data_ptr(), after.stride(0), rings.data_ptr(), SPARE),
        )
    )
    return y_TB.transpose(0, 1)


def _as_fields(*reals: float) -> tuple[int, ...]:
    """Numbers in double precision as the 64-bit fields they are passed in."""
    return struct.unpack(f"{len(reals)}q", struct.pack(f"{len(reals)}d", *reals))
