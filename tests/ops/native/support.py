"""The equations, token by token, in float64: what every kernel is compared with."""

import pytest
import torch
from torch import Tensor

from latte.ops import native

needs_library = pytest.mark.skipif(not native.available(), reason=native.describe())
EMPTY = -1e30


def spread(x: Tensor) -> Tensor:
    """The same values behind other strides: heads outermost, rows apart."""
    y = x.new_full((x.shape[0], x.shape[2], x.shape[1], x.shape[3] + 3), float("nan"))
    y[..., : x.shape[3]] = x.transpose(1, 2)
    return y[..., : x.shape[3]].transpose(1, 2)


def relative(a: Tensor, b: Tensor) -> float:
    """Largest difference relative to the largest value."""
    if a.numel() == 0:
        return 0.0
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-3))


def latte(
    p: Tensor, k: Tensor, v: Tensor, a: Tensor, S: Tensor, mask: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal Latte."""
    B, T = p.shape[:2]
    rows = []
    for b in range(B):
        a_b, S_b, ys = a[b], S[b], []
        for t in range(T):
            if reset is not None and reset[b, t]:
                a_b, S_b = torch.full_like(a_b, EMPTY), torch.zeros_like(S_b)
            if mask is not None and not mask[b, t]:
                ys.append(torch.zeros_like(v[b, t]))
                continue
            new = torch.logaddexp(a_b, k[b, t])
            S_b = (a_b - new).exp()[..., None] * S_b + (k[b, t] - new).exp()[..., None] * v[b, t][:, None]
            a_b = new
            ys.append(torch.einsum("hm,hmv->hv", p[b, t], S_b))
        rows.append((torch.stack(ys), a_b, S_b))
    return tuple(torch.stack(x) for x in zip(*rows, strict=True))  # type: ignore[return-value]


def window(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seg_q: Tensor | None,
    seg_k: Tensor | None,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Sliding-window attention as full attention with a mask; -1e30 is the log-sum-exp of a query that sees nothing."""
    T, S, repeat = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    score = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap > 0:
        score = softcap * (score / softcap).tanh()
    at = torch.arange(T)[:, None] + S - T
    key = torch.arange(S)[None]
    seen = ((key >= at - left) & (key <= at + right)).expand(q.shape[0], T, S)
    if seg_q is not None and seg_k is not None:
        seen = seen & (seg_q[:, :, None] == seg_k[:, None]) & (seg_q[:, :, None] >= 0)
    some = seen.any(-1)[:, None]
    score = score.masked_fill(~seen[:, None], -torch.inf).masked_fill(~some[..., None], 0.0)
    y = torch.einsum("bhij,bjhv->bihv", score.softmax(-1) * some[..., None], v)
    return y, score.logsumexp(-1).masked_fill(~some, EMPTY).transpose(1, 2)


def scan(
    log_a: Tensor, b: Tensor, h: Tensor, mask: Tensor | None, reset: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The diagonal scan, in either direction."""
    B, T = b.shape[:2]
    rows = []
    for n in range(B):
        state, out = h[n], [torch.zeros_like(b[n, 0])] * T
        for t in reversed(range(T)) if reverse else range(T):
            mark = t + 1 if reverse else t
            if reset is not None and mark < T and reset[n, mark]:
                state = torch.zeros_like(state)
            if mask is None or mask[n, t]:
                state = log_a[n, t].exp() * state + b[n, t]
                out[t] = state
        rows.append((torch.stack(out), state))
    return tuple(torch.stack(x) for x in zip(*rows, strict=True))  # type: ignore[return-value]


def decay(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, S: Tensor, mask: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Linear attention with decay."""
    B, T = q.shape[:2]
    rows = []
    for b in range(B):
        state, ys = S[b], []
        for t in range(T):
            if reset is not None and reset[b, t]:
                state = torch.zeros_like(state)
            if mask is not None and not mask[b, t]:
                ys.append(torch.zeros_like(v[b, t]))
                continue
            if g is not None:
                state = (g[b, t][:, None] if g.dim() == 3 else g[b, t]).exp()[..., None] * state
            state = state + k[b, t][..., None] * v[b, t][:, None]
            ys.append(torch.einsum("hk,hkv->hv", q[b, t], state))
        rows.append((torch.stack(ys), state))
    return tuple(torch.stack(x) for x in zip(*rows, strict=True))  # type: ignore[return-value]
