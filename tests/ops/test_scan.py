"""The scan against its sum written out, the convolution against torch's."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from latte.ops import causal_conv, diagonal_scan
from latte.tokens import Tokens
from tests.ops.helpers import CAUSAL, assert_close, flags, generator, normal

BACKENDS = ["reference", None, *CAUSAL["diagonal_scan"].backends]


@given(T=st.sampled_from([1, 2, 17, 64, 67]), seed=st.integers(0, 10**6), strength=st.sampled_from([0.05, 40.0]))
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_scan_is_a_faded_sum_over_the_document(backend, reverse, T, seed, strength):
    """h_t = sum_s prod_{s<j<=t} a_j b_s over the real tokens of the document, from either side."""
    g = generator(seed)
    log_a, b = -strength * normal(g, 2, T, 3).abs(), normal(g, 2, T, 3)
    mask, reset = flags(g, 2, T, 0.8), flags(g, 2, T, 0.1)
    h, state = diagonal_scan(log_a, b, tokens=Tokens.of(b, mask=mask, reset=reset), reverse=reverse, backend=backend)
    document = reset.long().cumsum(1)
    expected = torch.zeros_like(b)
    for row in range(2):
        for t in range(T):
            same = (document[row] == document[row, t]) & mask[row] & mask[row, t]
            for s in same.nonzero()[:, 0].tolist():
                if (s > t) if not reverse else (s < t):
                    continue
                between = range(s + 1, t + 1) if not reverse else range(t, s)
                faded = sum((log_a[row, j] for j in between if mask[row, j]), torch.zeros(3, dtype=torch.float64))
                expected[row, t] += faded.exp() * b[row, s]
    assert_close(h, expected)
    one, end = (slice(0, T // 2), slice(T // 2, T)) if not reverse else (slice(T // 2, T), slice(0, T // 2))
    if T > 1 and not (reverse and reset[:, T // 2].any()):
        first, second = (
            Tokens(2, part.stop - part.start, b.device, mask[:, part], reset[:, part]) for part in (one, end)
        )
        _, half = diagonal_scan(log_a[:, one], b[:, one], tokens=first, reverse=reverse)
        _, joined = diagonal_scan(log_a[:, end], b[:, end], state=half, tokens=second, reverse=reverse)
        assert_close(joined.h_BD, state.h_BD)


def test_a_long_scan_joins_its_runs():
    """Three levels of runs: the last value of 64 * 64 + 3 tokens that fade slowly, against the recurrence."""
    T, g = 64 * 64 + 3, generator(0)
    log_a, b = -0.01 * normal(g, 1, T, 2).abs(), normal(g, 1, T, 2)
    h = torch.zeros(1, 2, dtype=torch.float64)
    for t in range(T):
        h = log_a[:, t].exp() * h + b[:, t]
    got, state = diagonal_scan(log_a, b)
    assert_close(got[:, -1], h)
    assert_close(state.h_BD, h)


@given(T=st.sampled_from([1, 2, 3, 9]), size=st.integers(1, 5), bias=st.booleans(), seed=st.integers(0, 10**6))
@pytest.mark.parametrize("backend", ["reference", None])
def test_the_convolution_is_torch_conv1d_padded_on_the_left(backend, T, size, bias, seed):
    g = generator(seed)
    x, weight, offset = normal(g, 2, T, 4), normal(g, 4, size), normal(g, 4) if bias else None
    expected = F.conv1d(F.pad(x.mT, (size - 1, 0)), weight[:, None], offset, groups=4).mT
    y, state = causal_conv(x, weight, offset, backend=backend)
    assert_close(y, expected)
    assert torch.equal(state.tail_BKD, F.pad(x, (0, 0, size - 1, 0))[:, T:])


@given(T=st.sampled_from([1, 3, 12]), size=st.integers(1, 5), seed=st.integers(0, 10**6))
@pytest.mark.parametrize("backend", ["reference", None])
def test_the_convolution_sees_each_document_alone_without_its_padding(backend, T, size, seed):
    g = generator(seed)
    x, weight = normal(g, 2, T, 4), normal(g, 4, size)
    mask, reset = flags(g, 2, T, 0.7), flags(g, 2, T, 0.25)
    y, _ = causal_conv(x, weight, tokens=Tokens.of(x, mask=mask, reset=reset), backend=backend)
    document = reset.long().cumsum(1)
    expected = torch.zeros_like(x)
    for row in range(2):
        for number in document[row].unique():
            tokens = ((document[row] == number) & mask[row]).nonzero()[:, 0]
            if len(tokens):
                alone = F.pad(x[row, tokens].T, (size - 1, 0))
                expected[row, tokens] = F.conv1d(alone[None], weight[:, None], groups=4)[0].T
    assert_close(y, expected)
