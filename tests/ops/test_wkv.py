"""WKV as its definition, over many blocks and at the limits of float32; and the scan of logs that it is made of."""

import importlib
import math

import pytest
import torch

from latte.ops import WKVState, wkv
from latte.ops import log_scan as logs
from latte.ops.log_scan import log_scan
from latte.ops.numbers import EMPTY
from latte.tokens import Tokens
from tests.ops.helpers import assert_close, assert_states_close, flags, generator, normal

#: Named like the op, which hides it in the package.
MODULE = importlib.import_module("latte.ops.wkv")
pytestmark = pytest.mark.usefixtures("each_backend")


def definition(k, v, decay, bonus):
    """A softmax over s <= t for every t and channel: logits k_s - (t - 1 - s) w, for t itself u + k_t."""
    T = k.shape[1]
    distance = torch.arange(T)[:, None] - torch.arange(T)
    logits = k[:, None] - (distance - 1)[..., None] * decay
    logits = torch.where((distance == 0)[..., None], bonus + k[:, None], logits)
    weights = logits.masked_fill((distance < 0)[..., None], -torch.inf).softmax(2)
    return torch.einsum("btsd,bsd->btd", weights, v)


@pytest.mark.parametrize("T", [1, 2, 33, 70])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_it_is_the_mean_of_its_definition(T, size):
    g = generator(T)
    k, v, decay, bonus = size * normal(g, 2, T, 6), normal(g, 2, T, 6), normal(g, 6).exp(), normal(g, 6)
    expected = definition(k, v, decay, bonus)
    for backend in ("reference", "torch", None):
        assert_close(wkv(k, v, decay, bonus, backend=backend)[0], expected, what=str(backend))


def test_the_first_token_of_a_document_gives_its_value_to_the_last_bit():
    g = generator(0)
    k, v = 1e4 * normal(g, 2, 9, 4, dtype=torch.float32), normal(g, 2, 9, 4, dtype=torch.float32)
    reset = flags(g, 2, 9, 0.4)
    y, _ = wkv(k, v, torch.ones(4), torch.full((4,), -50.0), tokens=Tokens.of(k, reset=reset))
    first = reset.clone()
    first[:, 0] = True
    assert torch.equal(y[first], v[first])


def test_blocks_and_runs_of_any_size_are_one_function(monkeypatch):
    """Edges of blocks, runs, and runs of runs, padded and packed, with gradients."""
    g, T = generator(1), 75
    k, v = (normal(g, 2, T, 3).requires_grad_() for _ in range(2))
    decay, bonus = normal(g, 3).abs().requires_grad_(), normal(g, 3).requires_grad_()
    tokens = Tokens.of(k, mask=flags(g, 2, T, 0.8), reset=flags(g, 2, T, 0.05))
    inputs = [k, v, decay, bonus]
    direction = normal(g, 2, T, 3)
    y, after = wkv(*inputs, tokens=tokens, backend="reference")
    expected = torch.autograd.grad((y * direction).sum(), inputs)
    for block, run in ((1024, 3), (16, 4), (75, 75), (7, 2)):
        monkeypatch.setattr(MODULE, "BLOCK", block)
        monkeypatch.setattr(logs, "RUN", run)
        found, state = wkv(*inputs, tokens=Tokens(2, T, k.device, tokens.mask, tokens.reset))
        assert_close(found, y)
        assert_states_close(state, after)
        for mine, wanted in zip(torch.autograd.grad((found * direction).sum(), inputs), expected, strict=True):
            assert_close(mine, wanted, 1e-9)


def test_a_mean_that_hardly_fades_is_exact_after_many_tokens():
    """Weights that fade by 1e-6 a token, from a mean of 0 towards values of 1: float32 gates would be off by 0.3%."""
    T, decay = 200_000, torch.full((1,), 1e-6)
    pace = decay.double().item()
    total = -math.log(-math.expm1(-pace))  # the log-normaliser that one more token of logit 0 leaves as it is
    before = WKVState(torch.full((1, 1), total, dtype=torch.float64), torch.zeros(1, 1))
    with torch.no_grad():
        _, state = wkv(torch.zeros(1, T, 1), torch.ones(1, T, 1), decay, torch.zeros(1), state=before)
    assert_close(state.mean_BD[0, 0], torch.tensor(-math.expm1(-pace * T)), 1e-6)
    assert_close(state.log_norm_BD[0, 0], torch.tensor(total, dtype=torch.float64), 1e-10)


def test_a_scan_of_logs_without_gates_is_the_cumulative_logsumexp():
    k = 300 * normal(generator(0), 2, 100, 3)
    empty = torch.full((2, 3), EMPTY, dtype=torch.float64)
    found = log_scan(torch.zeros_like(k), k, empty)
    assert_close(found, k.logcumsumexp(1))
    # A gate per token: a gate of EMPTY starts anew.
    gates = -normal(generator(1), 2, 100, 3).abs()
    gates[:, 40] = 0
    total = gates[:, 40:].cumsum(1)
    gates[:, 40] = EMPTY
    found = log_scan(gates, k, empty)
    assert_close(found[:, 40:], (k[:, 40:] - total).logcumsumexp(1) + total)
