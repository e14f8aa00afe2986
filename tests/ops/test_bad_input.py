"""Every op says what it was given and what it expects, as a ValueError, before it computes anything."""

import re
from functools import partial

import pytest
import torch

from latte import ops
from latte.tokens import Tokens
from tests.ops.helpers import CAUSAL, generator

B, T = 2, 5


def zeros(*shape, **kwargs):
    return torch.zeros(shape, **kwargs)


#: Each op with inputs that fit: the tensors by name, and how to call it with them.
OPS = {
    "causal_latte": (ops.causal_latte, {"p": (B, T, 2, 3), "k": (B, T, 2, 3), "v": (B, T, 2, 4)}),
    "bidirectional_latte": (ops.bidirectional_latte, {"p": (B, T, 2, 3), "k": (B, T, 2, 3), "v": (B, T, 2, 4)}),
    "window_attention": (
        partial(ops.window_attention, left=2),
        {"q": (B, T, 4, 3), "k": (B, T, 2, 3), "v": (B, T, 2, 4)},
    ),
    "softmax_attention": (ops.softmax_attention, {"q": (B, T, 4, 3), "k": (B, T, 2, 3), "v": (B, T, 2, 4)}),
    "decay_attention": (
        ops.decay_attention,
        {"q": (B, T, 2, 3), "k": (B, T, 2, 3), "v": (B, T, 2, 4), "log_decay": (B, T, 2, 3)},
    ),
    "bonus_attention": (
        ops.bonus_attention,
        {"q": (B, T, 2, 3), "k": (B, T, 2, 3), "v": (B, T, 2, 4), "log_decay": (B, T, 2, 3), "bonus": (2, 3)},
    ),
    "delta_attention": (
        ops.delta_attention,
        {name: (B, T, 2, 4 if name == "v" else 3) for name in ("q", "k", "v", "a", "b", "log_decay")},
    ),
    "document_attention": (ops.document_attention, {"q": (B, T, 2, 3), "k": (B, T, 2, 3), "v": (B, T, 2, 4)}),
    "diagonal_scan": (ops.diagonal_scan, {"log_a": (B, T, 4), "b": (B, T, 4)}),
    "causal_conv": (ops.causal_conv, {"x": (B, T, 4), "weight": (4, 3), "bias": (4,)}),
}
TENSORS = [(op, name) for op, (_, shapes) in OPS.items() for name in shapes]


def call(op, changed=None, **kwargs):
    function, shapes = OPS[op]
    tensors = {name: zeros(*shape) for name, shape in shapes.items()}
    tensors.update(changed or {})
    return function(*tensors.values(), **kwargs)


def refused(op, *parts):
    """The message names the op, then the parts in order."""
    return pytest.raises(ValueError, match=op + ": .*" + ".*".join(re.escape(part) for part in parts))


@pytest.mark.parametrize("op", OPS)
def test_inputs_that_fit_are_accepted(op):
    assert call(op) is not None


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_a_tensor_of_another_rank_is_refused(op, name):
    shape = (*OPS[op][1][name], 1)
    if len(shape) == 5 and name == "log_decay" and op != "bonus_attention":
        with refused(op, "log_decay has shape (2, 5, 2, 3, 1)", "(B, T, H) or (B, T, H, K)"):
            call(op, {name: zeros(*shape)})
        return
    with refused(op, f"{name} has shape ({', '.join(map(str, shape))})", f"expected {len(shape) - 1} axes"):
        call(op, {name: zeros(*shape)})


@pytest.mark.parametrize(("op", "name"), [pair for pair in TENSORS if pair[1] not in ("p", "q", "log_a", "x")])
def test_a_tensor_of_another_size_is_refused(op, name):
    shape = OPS[op][1][name]
    shape = (shape[0] + 1, *shape[1:])
    with refused(op, f"{name} has shape ({', '.join(map(str, shape))}", "expected ("):
        call(op, {name: zeros(*shape)})


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_mixed_dtypes_are_refused(op, name):
    shape = OPS[op][1][name]
    with refused(op, "torch.float64" if name not in ("p", "q", "log_a", "x") else "torch.float32", "but"):
        call(op, {name: zeros(*shape, dtype=torch.float64)})
    with refused(op, f"{name} has dtype torch.int64", "expected a floating-point dtype"):
        call(op, {name: zeros(*shape, dtype=torch.long)})


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_mixed_devices_are_refused(op, name):
    with refused(op, "is on", "but", "is on"):
        call(op, {name: zeros(*OPS[op][1][name], device="meta")})


@pytest.mark.parametrize("op", OPS)
def test_no_tokens_are_refused(op):
    shapes = OPS[op][1]
    empty = {name: zeros(B, 0, *shape[2:]) for name, shape in shapes.items() if shape[:2] == (B, T)}
    with refused(op, "axis T is empty", "expected at least 1"):
        call(op, empty)


@pytest.mark.parametrize("name", ["mask", "reset"])
def test_flags_that_do_not_fit_are_refused(name):
    x = zeros(B, T, 4)
    with refused("model", f"{name} has shape (2, 4)", "expected (B=2, T=5)"):
        Tokens.of(x, **{name: torch.ones(B, T - 1, dtype=torch.bool)}, where="model")
    with refused("tokens", f"{name} has shape (5)", "expected 2 axes (B, T)"):
        Tokens.of(x, **{name: torch.ones(T, dtype=torch.bool)})
    with refused("tokens", f"{name} has dtype torch.float32", "expected torch.bool"):
        Tokens.of(x, **{name: torch.ones(B, T)})
    with refused("tokens", f"{name} has dtype torch.int64", "expected torch.bool"):
        Tokens.of(x, **{name: torch.ones(B, T, dtype=torch.long)})
    with refused("tokens", f"{name} is on meta", "is on cpu"):
        Tokens.of(x, **{name: torch.ones(B, T, dtype=torch.bool, device="meta")})


def test_counts_that_do_not_fit_are_refused():
    for start in (torch.zeros(3, dtype=torch.long), torch.zeros(B), torch.zeros(B, 1, dtype=torch.long)):
        with refused("tokens", "start is", "expected integers of shape (2,)"):
            Tokens.of(zeros(B, T, 4), start=start)


@pytest.mark.parametrize("op", OPS)
def test_tokens_of_another_batch_are_refused(op):
    with refused(op, "tokens are of shape (2, 4)", "expected (2, 5)"):
        call(op, tokens=Tokens.of(zeros(B, T - 1)))
    with refused(op, "tokens are on meta", "is on cpu"):
        call(op, tokens=Tokens.of(zeros(B, T, device="meta")))


@pytest.mark.parametrize("op", OPS)
def test_unknown_backends_are_refused(op):
    with refused(op, "backend is 'cuda'", "expected one of reference, torch, native"):
        call(op, backend="cuda")


def test_an_unknown_backend_in_the_environment_is_refused(monkeypatch):
    monkeypatch.setenv("LATTE_BACKEND", "fast")
    with refused("causal_latte", "backend is 'fast'", "expected one of reference, torch, native"):
        call("causal_latte")


@pytest.mark.parametrize("op", ["window_attention", "softmax_attention"])
def test_query_heads_that_are_no_multiple_of_key_heads_are_refused(op):
    with refused(op, "query heads is 4", "expected a positive multiple of key/value heads (3)"):
        call(op, {"k": zeros(B, T, 3, 3), "v": zeros(B, T, 3, 4)})


@pytest.mark.parametrize("name", CAUSAL)
def test_states_of_something_else_are_refused(name):
    op, g = CAUSAL[name], generator(0)
    inputs = op.make(g, B, T, torch.float32)

    def run(state):
        return op.call(*inputs, state=state, tokens=Tokens.of(inputs[0], start=torch.tensor([T] * B)))

    def state_of(rows):
        return op.run(op.make(g, rows, T, torch.float32))[1].layers[0][0]

    other = ops.ScanState(zeros(B, 4))
    other = ops.DecayState(zeros(B, 2, 3, 4)) if isinstance(state_of(B), ops.ScanState) else other
    with refused(op.op, f"state is a {type(other).__name__}", "expected a", type(state_of(B)).__name__):
        run(other)
    with refused(op.op, "state.", "has shape (3, ", "expected (2, "):
        run(state_of(3))
    with refused(op.op, "state.", "is on meta", "expected"):
        run(state_of(B).to("meta"))
    with refused(op.op, "state.", "torch.float16", "expected"):
        run(state_of(B).map(lambda x: x.half() if x.is_floating_point() else x))


def test_states_of_another_width_are_refused():
    state = ops.causal_latte(*(zeros(B, T, 2, 7) for _ in range(3)))[1]
    with refused("causal_latte", "state.log_norm_BHM has shape (2, 2, 7)", "expected (2, 2, 3)"):
        call("causal_latte", state=state)
    *_, state = call("window_attention")
    with refused("window_attention", "state.keys_BRGK has shape (2, 2, 2, 3)", "expected (2, 4, 2, 3)"):
        ops.window_attention(zeros(B, T, 4, 3), zeros(B, T, 2, 3), zeros(B, T, 2, 4), left=4, state=state)


def test_windows_that_make_no_sense_are_refused():
    window = partial(ops.window_attention, zeros(B, T, 4, 3), zeros(B, T, 2, 3), zeros(B, T, 2, 4))
    for name in ("left", "right", "sinks"):
        for value in (-1, 2.5):
            with refused("window_attention", f"{name} is {value}", "expected a whole number of tokens, at least 0"):
                window(**{"left": 2, name: value})
    with refused("window_attention", "right is 1", "expected right = 0"):
        window(left=2, right=1, sinks=1)
    with refused("window_attention", "right is 1", "expected right = 0"):
        window(left=2, right=1, state=window(left=2)[-1])
    with refused("window_attention", "sink_query has shape (2, 5, 2, 3)", "expected (B=2, T=5, H=4, K=3)"):
        window(left=2, sinks=1, sink_query=zeros(B, T, 2, 3))


def test_a_state_without_a_direction_is_refused():
    _, state = call("softmax_attention")
    with refused("softmax_attention", "a state was given with causal=False", "expected none"):
        call("softmax_attention", causal=False, state=state)


def test_log_decay_of_another_shape_is_refused():
    with refused("decay_attention", "log_decay has shape (2, 5)", "expected (H,), (B, T, H) or (B, T, H, K)"):
        call("decay_attention", {"log_decay": zeros(B, T)})
    with refused("decay_attention", "log_decay has shape (3)", "expected (H=2)"):
        call("decay_attention", {"log_decay": zeros(3)})
