"""The delta rule on the CPU: the operators latte::delta_attention and latte::delta_attention_backward.

B batch, T tokens, H heads, K key width, V value width.
"""

from typing import Any

import torch
from torch import Tensor

from latte.ops.native import library

torch.library.define(
    "latte::delta_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor a, Tensor? b, Tensor? log_decay, Tensor S0, Tensor? mask, Tensor? reset, "
    "bool keep) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "latte::delta_attention_backward",
    "(Tensor dy, Tensor dS1, Tensor u, Tensor q, Tensor k, Tensor v, Tensor a, Tensor? b, Tensor? log_decay, "
    "Tensor S0, Tensor? mask, Tensor? reset) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def delta_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None = None,
    log_decay: Tensor | None = None,
    S0: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run S_t = diag(exp(log_decay_t)) S_{t-1} + b_t (a_t^T S_{t-1}) + k_t v_t^T, y_t = q_t^T S_t.

    q, k, a, b: (B, T, H, K), b None for -k; v: (B, T, H, V); log_decay: None, (B, T, H) or (B, T, H, K), at most 0.
    S0: (B, H, K, V) or None.
    mask: (B, T) bool, True at real tokens: others keep the state, and give 0. reset: (B, T) bool, True where a document
    starts. Returns y (B, T, H, V) and the last state. Raises ValueError on other shapes or dtypes.
    """
    B, T, H, K = q.shape
    V = v.shape[-1]
    S0 = q.new_zeros((B, H, K, V)) if S0 is None else S0
    keys = {"k": k, "a": a} | ({} if b is None else {"b": b})
    library.same_kind(q=q, v=v, S0=S0, **keys)
    for name, x in keys.items():
        library.shape(name, x, B, T, H, K)
    library.shape("v", v, B, T, H, V)
    library.shape("S0", S0, B, H, K, V)
    library.tokens("mask", mask, B, T)
    library.tokens("reset", reset, B, T)
    if log_decay is not None:
        library.same_kind(q=q, log_decay=log_decay)
        library.shape("log_decay", log_decay, *((B, T, H) if log_decay.dim() == 3 else (B, T, H, K)))
    if library.direct(q, k, v, a, b, log_decay, S0) and T <= 16:
        return _forward(q, k, v, a, b, log_decay, S0, mask, reset, False)[:2]
    inputs = (q, k, v, a, b, log_decay, S0)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return torch.ops.latte.delta_attention(*inputs, mask, reset, keep)[:2]


def _outputs(q: Tensor, v: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H, K = q.shape
    V = v.shape[-1]
    return q.new_empty((B, T, H, V)), q.new_empty((B, H, K, V)), q.new_empty((B, T, H, V) if keep else (0,))


def _sizes(q: Tensor, v: Tensor, log_decay: Tensor | None) -> tuple[int, ...]:
    decays = 0 if log_decay is None else 1 if log_decay.dim() == 3 else q.shape[-1]
    return (*library.header(q), *q.shape, v.shape[-1], decays)


def _view(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if x is None or x.numel() == 0 else library.view(x)


def _rows(*tensors: Tensor | None) -> list[Tensor | None]:
    """Such as the kernels take; a decay per head has no innermost axis to look at."""
    return [x if x is None or x.dim() == 3 else library.rows(x) for x in tensors]


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    log_decay: Tensor | None,
    S0: Tensor,
    mask: Tensor | None,
    reset: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    S0 = S0.contiguous()
    mask, reset = (None if x is None else x.contiguous() for x in (mask, reset))
    y, S1, u = _outputs(q, v, keep)
    inputs = _rows(q, k, v, a, b, log_decay)
    library.kernel("delta_forward")(
        (
            *_sizes(q, v, log_decay),
            *(field for x in (*inputs, y, u) for field in _view(x)),
            *(library.pointer(x) for x in (S0, S1, mask, reset)),
        )
    )
    return y, S1, u


def _backward(
    dy: Tensor,
    dS1: Tensor,
    u: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    log_decay: Tensor | None,
    S0: Tensor,
    mask: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, ...]:
    S0, dS1 = S0.contiguous(), dS1.contiguous()
    mask, reset = (None if x is None else x.contiguous() for x in (mask, reset))
    inputs = _rows(q, k, v, a, b, log_decay, u, dy)
    gradients = _gradients_like(q, k, v, a, b, log_decay)
    dS0 = S0.new_empty(S0.shape)
    library.kernel("delta_backward")(
        (
            *_sizes(q, v, log_decay),
            *(field for x in (*inputs, *gradients) for field in _view(x)),
            *(library.pointer(x) for x in (S0, dS1, dS0, mask, reset)),
        )
    )
    return (*gradients, dS0)


def _gradients_like(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor | None, log_decay: Tensor | None
) -> list[Tensor]:
    """Room for the gradients, none where there is no input."""
    return [q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, a, b, log_decay)]


torch.library.impl("latte::delta_attention", "CPU", _forward)
torch.library.impl("latte::delta_attention_backward", "CPU", _backward)


@torch.library.register_fake("latte::delta_attention")
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(q, v, rest[-1])


@torch.library.register_fake("latte::delta_attention_backward")
def _(
    dy: Tensor,
    dS1: Tensor,
    u: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    log_decay: Tensor | None,
    S0: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    return (*_gradients_like(q, k, v, a, b, log_decay), S0.new_empty(S0.shape))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(output[2], *inputs[:-1])


def _gradients(ctx: Any, dy: Tensor, dS1: Tensor, du: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    *gradients, dS0 = torch.ops.latte.delta_attention_backward(dy, dS1, *saved)
    there = [None if x is None else gradient for x, gradient in zip(saved[1:7], gradients, strict=True)]
    return (*there, dS0, None, None, None)


library.register_gradients("delta_attention", _gradients, _save)
