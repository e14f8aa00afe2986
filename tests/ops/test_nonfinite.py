"""NaN or an infinite number in an input of one token: tokens before it keep every bit, those that see it show it."""

import pytest
import torch

from latte.ops import window_attention
from latte.ops.registry import registered_ops
from tests.ops.helpers import CAUSAL, generator

T = 70
#: Inputs, by place, that the token itself need not read.
UNREAD = {
    ("window_attention", 3): "a query for sinks, while no sink is behind the window",
    ("kept_attention", 3): "a score: it chooses, and NaN is the worst one",
    ("bonus_attention", 3): "a decay, which acts behind what its token reads",
    ("log_linear_attention", 3): "a decay, of which a document's first token has nothing to fade",
}
#: Inputs for which other forms may show NaN at more of the later tokens than the reference.
SPREADS = {("log_linear_attention", 3): "the reference fades block by block, and empty blocks show no NaN"}


def test_every_causal_op_is_here():
    assert {op.name for op in registered_ops() if op.causal} <= {op.op for op in CAUSAL.values()} | {"rglru"}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", CAUSAL)
def test_it_reaches_no_earlier_token_and_nan_does_not_vanish(name, bad):
    op, g = CAUSAL[name], generator(7)
    inputs = op.make(g, 2, T, torch.float64)
    places = [(i, s) for i in range(len(inputs)) for s in (0, 18, 45)]
    expected = {}
    for backend in ("reference", *op.backends):
        clean, _ = op.run(inputs, backend)
        for i, s in places:
            broken = [x.clone() for x in inputs]
            broken[i][0, s] = bad
            y, _ = op.run(broken, backend)
            what = f"{backend}, input {i}, token {s}"
            assert torch.equal(y[1], clean[1]), what
            assert torch.equal(y[0, :s], clean[0, :s]), what
            if bad == bad:
                continue
            shown = y[0].flatten(1).isnan().any(1)
            assert shown[s] or (op.op, i) in UNREAD, what
            expected.setdefault((i, s), shown)
            if (op.op, i) in SPREADS:
                shown = shown & expected[i, s]
            assert torch.equal(shown, expected[i, s]), what


@pytest.mark.parametrize("name", ["causal_latte", "decay_attention, per token", "delta_attention, per token"])
def test_states_and_gradients_show_it_and_padding_and_the_next_document_do_not(name):
    op, g = CAUSAL[name], generator(8)
    inputs = op.make(g, 2, T, torch.float64)
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[:, 20] = False
    clean, _ = op.run(inputs, "torch", mask=mask)
    inputs[2][0, 20] = torch.nan
    assert torch.equal(op.run(inputs, "torch", mask=mask)[0], clean)
    _, after = op.run(inputs, "torch")
    assert all(t[0].isnan().all() and t[1].isfinite().all() for _, t in after.layers[0][0].tensors())

    reset = torch.zeros(2, T, dtype=torch.bool)
    reset[:, 40] = True
    y, after = op.run(inputs, "torch", reset=reset)
    assert y[0, 20:40].isnan().all()
    assert y[0, 40:].isfinite().all()
    assert all(t.isfinite().all() for _, t in after.layers[0][0].tensors())

    leaves = [x.clone().requires_grad_() for x in inputs]
    op.run(leaves, "torch")[0].square().sum().backward()
    assert leaves[0].grad[0, 20:].isnan().all()
    assert leaves[0].grad[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [5, 64])
def test_native_windows_show_nan_queries_and_keys(dtype, width):
    """Blocks of queries and single ones, with values that fill vectors and values that don't."""
    if "native" not in CAUSAL["window_attention, left 20"].backends:
        pytest.skip("no native kernels on this machine")
    g = generator(9)
    for tokens in (2, 33):
        for place in range(3):
            qkv = [torch.randn(1, tokens, 2, width, generator=g, dtype=dtype) for _ in range(3)]
            clean, norm, _ = window_attention(*qkv, left=4, backend="native")
            qkv[place][0, 1, 0, 0] = torch.nan
            y, broken_norm, _ = window_attention(*qkv, left=4, backend="native")
            assert torch.equal(y[:, :1], clean[:, :1])
            assert torch.equal(y[:, :, 1], clean[:, :, 1])
            assert y[0, 1, 0].isnan().any()
            assert bool(broken_norm[0, 1, 0].isnan()) == (place < 2)
            assert torch.equal(broken_norm[:, :, 1], norm[:, :, 1])
