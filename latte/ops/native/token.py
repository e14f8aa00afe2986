"""One token through all layers of a model in one call, on the CPU: a function without gradients.

B batch, D width of the model, H heads, G key-value heads, V their width, I width inside the MLP.
"""

import ctypes
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
        *(options.exact_from, taps, *struct.unpack("4q", struct.pack("4d", *reals))),
        *(library.pointer(tensor) for tensor in (*before, speeds, *after)),
    )


#: The addresses of a layer's state, part by part, 0 for None.
Addresses = list[int]


def addresses(state: LayerState) -> Addresses:
    """Where a layer's state lies; its tensors are contiguous."""
    return [library.pointer(tensor) for tensor in state]


class StateRoom:
    """Makes room for new states of all layers, of the sizes of given ones.

    All tensors of one size come from one allocation: at one token, making dozens of them takes as long as a layer.
    """

    def __init__(self, states: Sequence[LayerState]) -> None:
        kinds: dict[tuple[tuple[int, ...], torch.dtype], list[tuple[int, int]]] = {}
        for layer, state in enumerate(states):
            for part, tensor in enumerate(state):
                if tensor is not None:
                    kinds.setdefault((tuple(tensor.shape), tensor.dtype), []).append((layer, part))
        self._shape = (len(states), len(states[0]))
        self._kinds = [(dtype, (len(places), *shape), places) for (shape, dtype), places in kinds.items()]

    def make(self) -> tuple[list[list[Tensor | None]], list[Addresses]]:
        """Tensors with anything in them, and where they lie."""
        layers, parts = self._shape
        tensors: list[list[Tensor | None]] = [[None] * parts for _ in range(layers)]
        where = [[0] * parts for _ in range(layers)]
        for dtype, shape, places in self._kinds:
            together = torch.empty(shape, dtype=dtype)
            address, size = together.data_ptr(), together.nbytes // len(places)
            for (layer, part), tensor in zip(places, together.unbind(), strict=True):
                tensors[layer][part] = tensor
                where[layer][part] = address
                address += size
        return tensors, where


def token_step(
    x: Tensor,
    norm: Tensor,
    sizes: Sizes,
    layers: Sequence[tuple[int, ...]],
    states: Sequence[Addresses],
    after: Sequence[Addresses],
) -> Tensor:
    """Hidden states (B, D) of one token a row, after the last norm; the layers' new states are written to ``after``.

    x: (B, D) embeddings; layers: of :func:`layer_fields`; states: for each layer where what feeds its latents, log_norm
    and mean of the latents, and ring keys, ring values, sink keys, sink values and count of the window lie. They stay
    as they are. The caller has checked all: at one token that would cost more than the work.
    """
    x = x.contiguous()
    y = torch.empty_like(x)
    fields: list[int] = []
    for fixed, old, new in zip(layers, states, after, strict=True):
        fields += fixed
        fields += old
        fields += new
    block = (ctypes.c_int64 * len(fields))(*fields)
    library.kernel("token")(
        (
            *library.header(x),
            x.shape[0],
            *sizes[:5],
            len(layers),
            *struct.unpack("q", struct.pack("d", sizes.eps)),
            *(x.data_ptr(), norm.data_ptr(), y.data_ptr(), ctypes.addressof(block)),
        )
    )
    return y
