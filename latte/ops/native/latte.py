"""Causal Latte on the CPU: the operators latte::causal_latte and latte::causal_latte_backward.

B batch, T tokens, H heads, M latents a head, V values a head.
"""

from typing import Any

import torch
from torch import Tensor

from latte.ops.native import library
from latte.ops.numbers import EMPTY

torch.library.define(
    "latte::causal_latte",
    "(Tensor p, Tensor k, Tensor v, Tensor log_norm0, Tensor mean0, Tensor? mask, Tensor? reset) "
    "-> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "latte::causal_latte_backward",
    "(Tensor dy, Tensor dlog_norm1, Tensor dmean1, Tensor p, Tensor k, Tensor v, Tensor log_norm0, Tensor mean0, "
    "Tensor? mask, Tensor? reset) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def causal_latte(
    p: Tensor,
    k: Tensor,
    v: Tensor,
    log_norm0: Tensor | None = None,
    mean0: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a_t = logaddexp(a_{t-1}, k_t), S_t = exp(a_{t-1} - a_t) S_{t-1} + exp(k_t - a_t) v_t^T, y_t = p_t^T S_t.

    p: (B, T, H, M) weights p(l|t); k: (B, T, H, M) key logits; v: (B, T, H, V), all float32 or all float64.
    log_norm0: (B, H, M) float64, EMPTY at the start; mean0: (B, H, M, V). None for both starts afresh.
    mask: (B, T) bool, True at real tokens; reset: (B, T) bool, True where a document starts.
    Returns y (B, T, H, V), log_norm (B, H, M) float64 and mean (B, H, M, V).
    Raises ValueError on other shapes or dtypes.
    """
    B, T, H, M = p.shape
    V = v.shape[-1]
    dtype = library.same_kind(p=p, k=k, v=v)
    library.shape("k", k, B, T, H, M)
    library.shape("v", v, B, T, H, V)
    library.tokens("mask", mask, B, T)
    library.tokens("reset", reset, B, T)
    if log_norm0 is None:
        log_norm0 = p.new_full((B, H, M), EMPTY, dtype=torch.float64)
    if mean0 is None:
        mean0 = p.new_zeros((B, H, M, V))
    library.shape("log_norm0", log_norm0, B, H, M)
    library.shape("mean0", mean0, B, H, M, V)
    if log_norm0.dtype != torch.float64 or mean0.dtype != dtype:
        raise ValueError(f"expected log_norm0 float64 and mean0 {dtype}, got {log_norm0.dtype} and {mean0.dtype}")
    if library.direct(p, k, v, log_norm0, mean0):
        return _forward(p, k, v, log_norm0, mean0, mask, reset)
    return torch.ops.latte.causal_latte(p, k, v, log_norm0, mean0, mask, reset)


def _outputs(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, M = p.shape
    V = v.shape[-1]
    return p.new_empty((B, T, H, V)), p.new_empty((B, H, M), dtype=torch.float64), p.new_empty((B, H, M, V))


def _sizes(p: Tensor, v: Tensor) -> tuple[int, ...]:
    return (*library.header(p), *p.shape, v.shape[-1])


def _forward(
    p: Tensor, k: Tensor, v: Tensor, log_norm0: Tensor, mean0: Tensor, mask: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    p, k, v = library.rows(p), library.rows(k), library.rows(v)
    log_norm0, mean0 = log_norm0.contiguous(), mean0.contiguous()
    mask, reset = (None if x is None else x.contiguous() for x in (mask, reset))
    y, log_norm1, mean1 = _outputs(p, v)
    library.kernel("latte_forward")(
        (
            *_sizes(p, v),
            *(field for x in (p, k, v, y) for field in library.view(x)),
            *(library.pointer(x) for x in (log_norm0, mean0, log_norm1, mean1, mask, reset)),
        )
    )
    return y, log_norm1, mean1


def _backward(
    dy: Tensor,
    dlog_norm1: Tensor,
    dmean1: Tensor,
    p: Tensor,
    k: Tensor,
    v: Tensor,
    log_norm0: Tensor,
    mean0: Tensor,
    mask: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    p, k, v, dy = library.rows(p), library.rows(k), library.rows(v), library.rows(dy)
    log_norm0, mean0, dlog_norm1, dmean1 = (x.contiguous() for x in (log_norm0, mean0, dlog_norm1, dmean1))
    mask, reset = (None if x is None else x.contiguous() for x in (mask, reset))
    dp, dk, dv, dlog_norm0, dmean0 = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (p, k, v, log_norm0, mean0)
    )
    library.kernel("latte_backward")(
        (
            *_sizes(p, v),
            *(field for x in (p, k, v, dy, dp, dk, dv) for field in library.view(x)),
            *(library.pointer(x) for x in (log_norm0, mean0, dlog_norm1, dmean1, dlog_norm0, dmean0, mask, reset)),
        )
    )
    return dp, dk, dv, dlog_norm0, dmean0


torch.library.impl("latte::causal_latte", "CPU", _forward)
torch.library.impl("latte::causal_latte_backward", "CPU", _backward)


@torch.library.register_fake("latte::causal_latte")
def _(p: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(p, v)


@torch.library.register_fake("latte::causal_latte_backward")
def _(
    dy: Tensor,
    dlog_norm1: Tensor,
    dmean1: Tensor,
    p: Tensor,
    k: Tensor,
    v: Tensor,
    log_norm0: Tensor,
    mean0: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (p, k, v, log_norm0, mean0))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor, dlog_norm1: Tensor, dmean1: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.latte.causal_latte_backward(dy, dlog_norm1, dmean1, *ctx.saved_tensors)
    return (*grads, None, None)


library.register_gradients("causal_latte", _gradients, _save)
