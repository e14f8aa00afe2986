"""One token of a Macchiato layer between its projections, on the CPU: a function without gradients.

B batch, H heads, G key-value heads, M latents a head, K and V widths, R slots of the window's ring, N sinks.
"""

import functools
import struct
from typing import NamedTuple

import torch
from torch import Tensor

from latte.ops.native import library


class WindowStep(NamedTuple):
    """The window's part: unrotated queries (B, H, K) and keys (B, G, K), and its state."""

    q: Tensor
    k: Tensor
    ring_keys: Tensor  # (B, R, G, K)
    ring_values: Tensor  # (B, R, G, V)
    sink_keys: Tensor  # (B, N, G, K)
    sink_values: Tensor  # (B, N, G, V)
    tokens_read: Tensor  # (B) of the document so far
    speeds: Tensor | None  # (K / 2) float64, radians a token of the rotary encoding; None: none
    softcap: float | None = None
    slot_bias: Tensor | None = None  # (H) added to slot 0
    coupled: bool = False  # slot 0's logit also holds the log-normaliser of the window's scores
    scale: float | None = None  # of queries times keys; None: 1/sqrt(K)
    stretch: float = 1.0  # of turned queries and keys
    exact_from: int = 0  # places before this have their angles rounded to float32


def macchiato_step(
    slots: Tensor,
    k: Tensor,
    v: Tensor,
    log_norm: Tensor,
    mean: Tensor,
    window: WindowStep | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...] | None]:
    """y = p_0 window(q) + sum_l p_l mean_l with p = softmax(slots), after the token (k, v) has been read.

    slots: (B, H, M) logits, (B, H, M + 1) with a window, slot 0 first; k: (B, H, M) logits; v: (B, G, V); log_norm and
    mean: the latents' state; mask and reset: (B) bool or None. Returns y (B, H, V), the new log_norm and mean, and with
    a window its new ring keys, ring values, sink keys, sink values and count. What is given stays as it is.
    The caller has checked shapes and dtypes: at one token that would cost more than the work.
    """
    B, H, M, V = mean.shape
    G = v.shape[1]
    slots, k, v = _row(slots), _row(k), _row(v)
    log_norm, mean = log_norm.contiguous(), mean.contiguous()
    mask, reset = (None if x is None else x.contiguous() for x in (mask, reset))
    y, log_norm1, mean1 = v.new_empty((B, H, V)), torch.empty_like(log_norm), torch.empty_like(mean)
    inputs: list[int] = [slots.data_ptr(), slots.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)]
    if window is None:
        K, R, N, rope, coupled, exact_from, scale, softcap, stretch = 1, 0, 0, 0, 0, 0, 1.0, 0.0, 1.0
        inputs += (0,) * 6
        old = new = [0] * 5
        after = None
    else:
        K, R, N = window.q.shape[-1], window.ring_keys.shape[1], window.sink_keys.shape[1]
        rope, coupled, exact_from = int(window.speeds is not None), int(window.coupled), window.exact_from
        scale, softcap, stretch = window.scale or K**-0.5, window.softcap or 0.0, window.stretch
        q, key = _row(window.q), _row(window.k)
        inputs += [q.data_ptr(), q.stride(0), key.data_ptr(), key.stride(0)]
        inputs += [library.pointer(window.slot_bias), library.pointer(window.speeds)]
        before = [x.contiguous() for x in window[2:7]]
        after = tuple(torch.empty_like(x) for x in before)
        old, new = [x.data_ptr() for x in before], [x.data_ptr() for x in after]
    library.kernel("decode")(
        (
            *library.header(mean),
            *(B, H, G, M, K, V, R, N, R),
            *(int(window is not None), rope, coupled, exact_from),
            *struct.unpack("qqq", struct.pack("ddd", scale, softcap, stretch)),
            *inputs,
            y.data_ptr(),
            *(log_norm.data_ptr(), mean.data_ptr(), *old),
            *(log_norm1.data_ptr(), mean1.data_ptr(), *new),
            *(library.pointer(mask), library.pointer(reset)),
        )
    )
    return y, log_norm1, mean1, after


def _row(x: Tensor) -> Tensor:
    """x, or a copy in which each row of the batch is contiguous."""
    return x if x[0].is_contiguous() else x.contiguous()


@functools.cache
def rotary_speeds(frequencies: tuple[float, ...]) -> Tensor:
    """Radians a token for each pair of channels, where kernels find them."""
    return torch.tensor(frequencies, dtype=torch.float64, device="cpu")
