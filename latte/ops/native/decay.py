"""Linear attention with decay on the CPU: the operators latte::decay_attention and latte::decay_attention_backward.

B batch, T tokens, H heads, K key width, V value width.
"""

from typing import Any

import torch
from torch import Tensor

from latte.ops.native import library

torch.library.define(
    "latte::decay_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor S0, Tensor? mask, Tensor? reset) -> (Tensor, Tensor)",
)
torch.library.define(
    "latte::decay_attention_backward",
    "(Tensor dy, Tensor dS1, Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor S0, Tensor? mask, Tensor? reset) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def decay_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    S0: Tensor | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T, y_t = q_t^T S_t.

    q, k: (B, T, H, K); v: (B, T, H, V); log_decay: None, (B, T, H) or (B, T, H, K), at most 0.
    S0: (B, H, K, V) or None.
    mask: (B, T) bool, True at real tokens: others keep the state, and give 0. reset: (B, T) bool, True where a document
    starts. Returns y (B, T, H, V) and the last state. Raises ValueError on other shapes or dtypes.
    """
    B, T, H, K = q.shape
    V = v.shape[-1]
    S0 = q.new_zeros((B, H, K, V)) if S0 is None else S0
    library.same_kind(q=q, k=k, v=v, S0=S0)
    library.shape("k", k, B, T, H, K)
    library.shape("v", v, B, T, H, V)
    library.shape("S0", S0, B, H, K, V)
    library.tokens("mask", mask, B, T)
    library.tokens("reset", reset, B, T)
    if log_decay is not None:
        library.same_kind(q=q, log_decay=log_decay)
        library.shape("log_decay", log_decay, *((B, T, H) if log_decay.dim() == 3 else (B, T, H, K)))
    if library.direct(q, k, v, log_decay, S0) and T <= 16:
        return _forward(q, k, v, log_decay, S0, mask, reset)
    return torch.ops.latte.decay_attention(q, k, v, log_decay, S0, mask, reset)


def _outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    B, T, H, K = q.shape
    V = v.shape[-1]
    return q.new_empty((B, T, H, V)), q.new_empty((B, H, K, V))


def _sizes(q: Tensor, v: Tensor, log_decay: Tensor | None) -> tuple[int, ...]:
    decays = 0 if log_decay is None else 1 if log_decay.dim() == 3 else q.shape[-1]
    return (*library.header(q), *q.shape, v.shape[-1], decays)


def _view(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if x is None else library.view(x)


def _rows(log_decay: Tensor | None) -> Tensor | None:
    return log_decay if log_decay is None or log_decay.dim() == 3 else library.rows(log_decay)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    S0: Tensor,
    mask: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor]:
    q, k, v, log_decay, S0 = library.rows(q), library.rows(k), library.rows(v), _rows(log_decay), S0.contiguous()
    mask, reset = (None if x is None else x.contiguous() for x in (mask, reset))
    y, S1 = _outputs(q, v)
    library.kernel("decay_forward")(
        (
            *_sizes(q, v, log_decay),
            *(field for x in (q, k, v, log_decay, y) for field in _view(x)),
            *(library.pointer(x) for x in (S0, S1, mask, reset)),
        )
    )
    return y, S1


def _backward(
    dy: Tensor,
    dS1: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    S0: Tensor,
    mask: Tensor | None,
    reset: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, k, v, dy, log_decay = library.rows(q), library.rows(k), library.rows(v), library.rows(dy), _rows(log_decay)
    S0, dS1 = S0.contiguous(), dS1.contiguous()
    mask, reset = (None if x is None else x.contiguous() for x in (mask, reset))
    dq, dk, dv, dS0 = (x.new_empty(x.shape) for x in (q, k, v, S0))
    dg = None if log_decay is None else log_decay.new_empty(log_decay.shape)
    library.kernel("decay_backward")(
        (
            *_sizes(q, v, log_decay),
            *(field for x in (q, k, v, log_decay, dy, dq, dk, dv, dg) for field in _view(x)),
            *(library.pointer(x) for x in (S0, dS1, dS0, mask, reset)),
        )
    )
    return dq, dk, dv, q.new_empty(0) if dg is None else dg, dS0


torch.library.impl("latte::decay_attention", "CPU", _forward)
torch.library.impl("latte::decay_attention_backward", "CPU", _backward)


@torch.library.register_fake("latte::decay_attention")
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _outputs(q, v)


@torch.library.register_fake("latte::decay_attention_backward")
def _(
    dy: Tensor, dS1: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, S0: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    dg = q.new_empty(0) if log_decay is None else log_decay.new_empty(log_decay.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dg, S0.new_empty(S0.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor, dS1: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    dq, dk, dv, dg, dS0 = torch.ops.latte.decay_attention_backward(dy, dS1, *saved)
    return dq, dk, dv, None if saved[3] is None else dg, dS0, None, None


library.register_gradients("decay_attention", _gradients, _save)
