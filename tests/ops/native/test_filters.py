"""The kernels of channels with slots against their recurrences, token by token, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from latte.ops import native
from tests.ops.native.support import needs_library, relative

pytestmark = needs_library


class Filter(NamedTuple):
    """A kernel, the shapes of its inputs and how they are bounded, its state's last axes, and one token of it."""

    kernel: Callable[..., tuple[Tensor, Tensor]]
    inputs: Callable[[torch.Generator, int, int, int, int], list[Tensor]]  # of generator, B, T, D and N
    over_tokens: tuple[int, ...]  # which of the inputs are (B, T, ...)
    fresh: tuple[float, ...]  # of a slot, before any token
    token: Callable[..., tuple[Tensor, Tensor]]  # of inputs at a token and the state: output, state
    wide: tuple[int, ...] = ()  # inputs that are always float64


def state_space_token(z: Tensor, a: Tensor, c: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.view_as_real(torch.view_as_complex(a.contiguous()) * torch.view_as_complex(h.contiguous()))
    h = h + torch.stack([z, torch.zeros_like(z)], -1)[:, None]
    return (c * h).sum((-1, -2)), h


def selective_token(x: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    h = (delta[:, None] * A).exp() * h + (delta * x)[:, None] * B
    return h @ C, h


def kalman_token(
    v: Tensor, noise: Tensor, k: Tensor, q: Tensor, a: Tensor, p: Tensor, h: Tensor
) -> tuple[Tensor, Tensor]:
    """The textbook filter, by variance and gain."""
    precision, mean = h.unbind(-1)
    mean, variance = a * mean, a**2 / precision + p
    gain = variance * k / (k**2 * variance + 1 / noise[:, None])
    mean, variance = mean + gain * (v[:, None] - k * mean), (1 - gain * k) * variance
    return mean @ q, torch.stack([1 / variance, mean], -1)


def draws(g: torch.Generator, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]


def state_space_inputs(g: torch.Generator, B: int, T: int, D: int, N: int) -> list[Tensor]:
    z, a, c = draws(g, (B, T, D), (D, N, 2), (D, N, 2))
    return [z, a / (0.1 + a.norm(dim=-1, keepdim=True)), c]


def selective_inputs(g: torch.Generator, B: int, T: int, D: int, N: int) -> list[Tensor]:
    x, delta, A, b, c = draws(g, (B, T, D), (B, T, D), (D, N), (B, T, N), (B, T, N))
    return [x, delta.abs(), -A.abs(), b, c]


def kalman_inputs(g: torch.Generator, B: int, T: int, D: int, N: int) -> list[Tensor]:
    v, noise, k, q, a, p = draws(g, (B, T, D), (B, T, D), (B, T, N), (B, T, N), (D, N), (D, N))
    return [v, noise.abs() + 0.1, k, q, a.sigmoid(), 0.1 * p.abs() + 0.01]


FILTERS = {
    "state_space": Filter(native.state_space, state_space_inputs, (0,), (0.0, 0.0), state_space_token, wide=(1, 2, 3)),
    "selective_scan": Filter(native.selective_scan, selective_inputs, (0, 1, 3, 4), (0.0,), selective_token),
    "kalman": Filter(native.kalman, kalman_inputs, (0, 1, 2, 3), (1.0, 0.0), kalman_token),
}
each = pytest.mark.parametrize("name", FILTERS)


def expected_of(
    filter_: Filter, inputs: list[Tensor], h0: Tensor, mask: Tensor | None, reset: Tensor | None
) -> tuple[Tensor, Tensor]:
    ys, states = [], []
    for b in range(h0.shape[0]):
        h, out = h0[b], []
        for t in range(inputs[0].shape[1]):
            if reset is not None and reset[b, t]:
                h = torch.tensor(filter_.fresh, dtype=h.dtype).expand_as(h[..., None] if h.dim() == 2 else h)
                h = h[..., 0] if len(filter_.fresh) == 1 else h
            if mask is not None and not mask[b, t]:
                out.append(torch.zeros_like(inputs[0][b, t]))
                continue
            here = [x[b, t] if i in filter_.over_tokens else x for i, x in enumerate(inputs)]
            y, h = filter_.token(*here, h)
            out.append(y)
        ys.append(torch.stack(out))
        states.append(h)
    return torch.stack(ys), torch.stack(states)


def drawn(name: str, seed: int, B: int, T: int, D: int, N: int, masks: bool):
    g = torch.Generator().manual_seed(seed)
    filter_ = FILTERS[name]
    inputs = filter_.inputs(g, B, T, D, N)
    shape = (B, D, N) if len(filter_.fresh) == 1 else (B, D, N, 2)
    h0 = torch.rand(shape, generator=g, dtype=torch.float64) + 0.1
    mask = torch.rand(B, T, generator=g) < 0.7 if masks else None
    reset = torch.rand(B, T, generator=g) < 0.15 if masks else None
    return filter_, inputs, h0, mask, reset


def gradients(function, leaves: list[Tensor]):
    leaves = [x.detach().requires_grad_() for x in leaves]
    outputs = function(*leaves)
    g = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=g, dtype=torch.float64).to(x.dtype)).sum() for x in outputs)
    return [x.detach() for x in outputs], torch.autograd.grad(loss, leaves, materialize_grads=True)


def narrowed(filter_: Filter, leaves: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x if i in filter_.wide else x.to(dtype) for i, x in enumerate(leaves)]


@each
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    T=st.sampled_from([1, 2, 7, 63, 64, 65, 130]),
    D=st.sampled_from([1, 3, 8, 17, 70]),
    N=st.sampled_from([1, 2, 5]),
    masks=st.booleans(),
    strided=st.booleans(),
)
def test_outputs_and_gradients_follow_the_recurrence(name, T, D, N, masks, strided):
    filter_, inputs, h0, mask, reset = drawn(name, T + D + N, 2, T, D, N, masks)
    leaves = [*inputs, h0]
    got64 = gradients(lambda *x: expected_of(filter_, list(x[:-1]), x[-1], mask, reset), leaves)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
        given_ = narrowed(filter_, leaves, dtype)
        if strided:
            given_ = [torch.stack([x, x], -1)[..., 0] for x in given_]
        got = gradients(lambda *x: filter_.kernel(*x, mask, reset), given_)
        for x, y in zip((*got[0], *got[1]), (*got64[0], *got64[1]), strict=True):
            assert relative(x, y) < tolerance


@each
def test_masked_tokens_are_inert_whatever_they_hold(name):
    filter_, inputs, h0, mask, reset = drawn(name, 2, 2, 70, 9, 3, True)
    expected = gradients(lambda *x: filter_.kernel(*x, mask, reset), [*inputs, h0])
    for i in filter_.over_tokens:
        inputs[i][~mask] = float("nan")
    got = gradients(lambda *x: filter_.kernel(*x, mask, reset), [*inputs, h0])
    for x, y in zip((*got[0], *got[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(x, y)
    assert not got[0][0][~mask].any()


@each
def test_the_future_changes_no_bit(name):
    filter_, inputs, h0, *_ = drawn(name, 3, 1, 80, 9, 3, False)
    leaves = narrowed(filter_, [*inputs, h0], torch.float32)
    y = filter_.kernel(*leaves)[0]
    changed = [x.clone() for x in leaves]
    for i in filter_.over_tokens:
        changed[i][:, 17:] = 1e3
    assert torch.equal(filter_.kernel(*changed)[0][:, :17], y[:, :17])
    parts, h = [], leaves[-1]
    for part in (slice(0, 17), slice(17, 80)):
        here = [x[:, part] if i in filter_.over_tokens else x for i, x in enumerate(leaves[:-1])]
        out, h = filter_.kernel(*here, h)
        parts.append(out)
    assert torch.equal(torch.cat(parts, 1), y)


@each
def test_threads_change_no_bit(name):
    filter_, inputs, h0, *_ = drawn(name, 4, 3, 200, 70, 4, False)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append(gradients(filter_.kernel, [*inputs, h0]))
    finally:
        torch.set_num_threads(threads)
    for x, y in zip((*results[0][0], *results[0][1]), (*results[1][0], *results[1][1]), strict=True):
        assert torch.equal(x, y)


@each
def test_operator_is_well_formed_and_compiles(name):
    filter_, inputs, h0, mask, reset = drawn(name, 5, 2, 20, 5, 2, True)
    leaves = [x.requires_grad_() for x in (*inputs, h0)]

    def function(*x: Tensor) -> Tensor:
        return filter_.kernel(*x, mask, reset)[0].sin().sum()

    got, expected = torch.compile(function, fullgraph=True, backend="aot_eager")(*leaves), function(*leaves)
    assert torch.equal(got, expected)
    for x, y in zip(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert torch.equal(x, y)


def test_the_operator_passes_the_checks_of_torch():
    g = torch.Generator().manual_seed(0)
    x, w, shared, par, h0 = draws(g, (2, 20, 5), (2, 20, 5), (2, 20, 2, 3), (1, 3, 5), (2, 3, 1, 5))
    leaves = [t.requires_grad_() for t in (x, w.abs(), shared, -par.abs(), h0)]
    torch.library.opcheck(torch.ops.latte.filters, (1, *(t.detach().requires_grad_() for t in leaves), None, None))


@each
def test_wrong_inputs_are_named(name):
    filter_, inputs, h0, *_ = drawn(name, 6, 1, 4, 3, 2, False)
    with pytest.raises(ValueError, match="h0: expected shape"):
        filter_.kernel(*inputs, h0[:, :2])
