"""Recurrences of channels with slots on the CPU: the operators latte::filters and latte::filters_backward.

B batch, T tokens, D channels, N slots of each. See filters.h for how they are computed, filters.cpp for the kinds.
"""

from typing import Any

import torch
from torch import Tensor

from latte.ops.native import library

STATE_SPACE, SELECTIVE, KALMAN = range(3)
# Numbers of a slot's state, and what all channels share for a slot, by kind.
STATES, SHARED = (2, 1, 2), (0, 2, 2)
# Tokens between kept states: as in filters.h.
BLOCK = 64
# Parts of the channels that threads share out, of at least so many channels. Sums over channels are made part by part,
# so that results don't depend on the number of threads.
CUTS, LEAST_CUT = 8, 8

torch.library.define(
    "latte::filters",
    "(int kind, Tensor x, Tensor? w, Tensor? shared, Tensor par, Tensor h0, Tensor? mask, Tensor? reset) "
    "-> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "latte::filters_backward",
    "(int kind, Tensor dy, Tensor dh1, Tensor x, Tensor? w, Tensor? shared, Tensor par, Tensor kept, Tensor? mask, "
    "Tensor? reset) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def state_space(
    z: Tensor, a: Tensor, c: Tensor, h0: Tensor, mask: Tensor | None = None, reset: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run h_t = a h_{t-1} + z_t over complex numbers and read y_t = sum_n c_re h_re + c_im h_im.

    z: (B, T, D), float32 or float64; a, c: (D, N, 2) and h0: (B, D, N, 2), float64, real parts first. mask: (B, T)
    bool, True at real tokens: others keep the state, and give 0. reset: (B, T) bool, True where a document starts.
    Returns y (B, T, D) in z's dtype and the last state. Raises ValueError on other shapes or dtypes.
    """
    (B, _, D), N = z.shape, a.shape[1]
    library.same_kind(z=z)
    if library.same_kind(a=a, c=c, h0=h0) != torch.float64:
        raise ValueError(f"a: expected float64, got {a.dtype}")
    for name, x in (("a", a), ("c", c)):
        library.shape(name, x, D, N, 2)
    library.shape("h0", h0, B, D, N, 2)
    par = torch.cat([a, c], dim=-1).permute(2, 1, 0)
    y, h1 = _run(STATE_SPACE, z, None, None, par, h0.permute(0, 2, 3, 1), mask, reset)
    return y, h1.permute(0, 3, 1, 2)


def selective_scan(
    x: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    h0: Tensor,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run h_t = exp(delta_t A) h_{t-1} + delta_t x_t B_t and read y_t = sum_n C_t h_t.

    x and delta: (B, T, D); A: (D, N), at most 0; B and C: (B, T, N); h0: (B, D, N), all of one dtype. mask and reset as
    for ``state_space``. Returns y (B, T, D) and the last state. Raises ValueError on other shapes or dtypes.
    """
    (rows, T, D), N = x.shape, A.shape[1]
    library.same_kind(x=x, delta=delta, A=A, B=B, C=C, h0=h0)
    library.shape("delta", delta, rows, T, D)
    library.shape("A", A, D, N)
    for name, tensor in (("B", B), ("C", C)):
        library.shape(name, tensor, rows, T, N)
    library.shape("h0", h0, rows, D, N)
    shared, state = torch.stack([B, C], dim=2), h0.transpose(1, 2)[:, :, None]
    y, h1 = _run(SELECTIVE, x, delta, shared, A.T[None], state, mask, reset)
    return y, h1[:, :, 0].transpose(1, 2)


def kalman(
    v: Tensor,
    noise: Tensor,
    k: Tensor,
    q: Tensor,
    a: Tensor,
    p: Tensor,
    h0: Tensor,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the scalar Kalman filters of ``latte.ops.kalman`` and read y_t = sum_n q_t m_t.

    v and noise: (B, T, D); k and q: (B, T, N); a and p: (D, N); h0: (B, D, N, 2), precisions and means, all of one
    dtype. mask and reset as for ``state_space``; a document starts with precision 1 and mean 0. Returns y (B, T, D) and
    the last state. Raises ValueError on other shapes or dtypes.
    """
    (B, T, D), N = v.shape, a.shape[1]
    library.same_kind(v=v, noise=noise, k=k, q=q, a=a, p=p, h0=h0)
    library.shape("noise", noise, B, T, D)
    for name, x in (("a", a), ("p", p)):
        library.shape(name, x, D, N)
    for name, x in (("k", k), ("q", q)):
        library.shape(name, x, B, T, N)
    library.shape("h0", h0, B, D, N, 2)
    shared, par = torch.stack([k, q], dim=2), torch.stack([a, p]).transpose(1, 2)
    y, h1 = _run(KALMAN, v, noise, shared, par, h0.permute(0, 2, 3, 1), mask, reset)
    return y, h1.permute(0, 3, 1, 2)


def _run(
    kind: int,
    x: Tensor,
    w: Tensor | None,
    shared: Tensor | None,
    par: Tensor,
    h0: Tensor,
    mask: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    library.tokens("mask", mask, *x.shape[:2])
    library.tokens("reset", reset, *x.shape[:2])
    y, h1, _ = torch.ops.latte.filters(kind, x, w, shared, par, h0, mask, reset)
    return y, h1


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def _sizes(kind: int, x: Tensor, N: int) -> tuple[int, ...]:
    B, T, D = x.shape
    return (*library.header(x), kind, B, T, D, N, max(1, min(CUTS, D // LEAST_CUT)))


def _forward(
    kind: int,
    x: Tensor,
    w: Tensor | None,
    shared: Tensor | None,
    par: Tensor,
    h0: Tensor,
    mask: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    x, w, shared, par, h0, mask, reset = _contiguous(x, w, shared, par, h0, mask, reset)  # type: ignore[assignment]
    y, h1, kept = (x.new_empty(x.shape), h0.new_empty(h0.shape), _kept(x, h0))
    library.kernel("filter_forward")(
        (
            *_sizes(kind, x, par.shape[1]),
            *(library.pointer(t) for t in (x, w, shared, par, h0, y, h1, kept, mask, reset)),
        )
    )
    return y, h1, kept


def _kept(x: Tensor, h0: Tensor) -> Tensor:
    return h0.new_empty((h0.shape[0], -(-x.shape[1] // BLOCK), *h0.shape[1:]))


def _backward(
    kind: int,
    dy: Tensor,
    dh1: Tensor,
    x: Tensor,
    w: Tensor | None,
    shared: Tensor | None,
    par: Tensor,
    kept: Tensor,
    mask: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dy, dh1, x, w, shared, par, mask, reset = _contiguous(dy, dh1, x, w, shared, par, mask, reset)  # type: ignore[assignment]
    sizes = _sizes(kind, x, par.shape[1])
    (B, T, D), (P, N, _) = x.shape, par.shape
    dx, dw, dshared, _, dh0 = _empty_gradients(kind, x, w, shared, par, dh1)
    sums = par.new_empty((sizes[-1], B, T, N, SHARED[kind]))
    dpar = par.new_empty((B, N, P, D))
    library.kernel("filter_backward")(
        (
            *sizes,
            *(library.pointer(t) for t in (x, w, shared, par, kept, dy, dh1, dx, dw, sums, dpar, dh0, mask, reset)),
        )
    )
    if shared is not None:
        dshared = sums.sum(0).transpose(2, 3).contiguous()
    return dx, dw, dshared, dpar.sum(0).transpose(0, 1).contiguous(), dh0


def _empty_gradients(
    kind: int, x: Tensor, w: Tensor | None, shared: Tensor | None, par: Tensor, dh1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Room for all gradients; of what there is none, nothing."""
    dw, dshared = (t.new_empty(0) if g is None else g.new_empty(g.shape) for t, g in ((x, w), (par, shared)))
    return x.new_empty(x.shape), dw, dshared, par.new_empty(par.shape), dh1.new_empty(dh1.shape)


torch.library.impl("latte::filters", "CPU", _forward)
torch.library.impl("latte::filters_backward", "CPU", _backward)


@torch.library.register_fake("latte::filters")
def _(kind: int, x: Tensor, w: Any, shared: Any, par: Tensor, h0: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), h0.new_empty(h0.shape), _kept(x, h0)


@torch.library.register_fake("latte::filters_backward")
def _(
    kind: int, dy: Tensor, dh1: Tensor, x: Tensor, w: Tensor | None, shared: Tensor | None, par: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return _empty_gradients(kind, x, w, shared, par, dh1)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.kind, x, w, shared, par, _, mask, reset = inputs
    ctx.save_for_backward(x, w, shared, par, output[2], mask, reset)


def _gradients(ctx: Any, dy: Tensor, dh1: Tensor, dkept: Tensor) -> tuple[Tensor | None, ...]:
    dx, dw, dshared, dpar, dh0 = torch.ops.latte.filters_backward(ctx.kind, dy, dh1, *ctx.saved_tensors)
    _, w, shared, *_ = ctx.saved_tensors
    return None, dx, None if w is None else dw, None if shared is None else dshared, dpar, dh0, None, None


library.register_gradients("filters", _gradients, _save)
