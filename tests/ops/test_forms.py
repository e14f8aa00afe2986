"""Every causal op is one function, however it is computed: reference, chunked, step by step, in pieces."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.helpers import CAUSAL, LENGTHS, assert_close, assert_states_close, flags, generator

pytestmark = pytest.mark.parametrize("name", CAUSAL)


def pieces(op, inputs, cuts, state=None, mask=None, reset=None, backend=None):
    """Run an op over the pieces between ``cuts``, carrying the state."""
    edges = [0, *sorted(cuts), inputs[0].shape[1]]
    outputs = []
    for start, stop in itertools.pairwise(edges):
        if start == stop:
            continue
        part = slice(start, stop)
        y, state = op.run(
            [x[:, part] for x in inputs],
            backend,
            state=state,
            mask=None if mask is None else mask[:, part],
            reset=None if reset is None else reset[:, part],
        )
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


@given(
    T=st.sampled_from(LENGTHS),
    seed=st.integers(0, 10**6),
    carry=st.booleans(),
    masked=st.booleans(),
    documents=st.booleans(),
    cuts=st.sets(st.integers(0, 81), max_size=3),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
def test_reference_chunks_steps_and_pieces_agree(name, T, seed, carry, masked, documents, cuts, dtype):
    op, g, B = CAUSAL[name], generator(seed), 3
    inputs = op.make(g, B, T, dtype)
    mask = flags(g, B, T, 0.7) if masked else None
    reset = flags(g, B, T, 0.15) if documents else None
    state = op.run(op.make(g, B, 7, dtype))[1] if carry else None
    kwargs = {"state": state, "mask": mask, "reset": reset}
    more = op.make(g, B, 9, dtype)

    y, after = op.run(inputs, "reference", **kwargs)
    following, _ = op.run(more, "reference", state=after)
    forms = {backend: op.run(inputs, backend, **kwargs) for backend in op.backends}
    forms["default"] = op.run(inputs, **kwargs)
    if T <= 33:
        forms["steps"] = pieces(op, inputs, range(1, T), **kwargs)
    forms["pieces"] = pieces(op, inputs, [c for c in cuts if c < T], **kwargs)
    for form, (other, state_after) in forms.items():
        assert_close(other, y, what=form)
        if reset is None:
            # Behind a document's start a state may hold anything: there only what follows shows that it is right.
            assert_states_close(state_after, after)
        assert_close(op.run(more, state=state_after)[0], following, what=f"what follows {form}")
    if mask is not None:
        assert (y[~mask] == 0).all()
        assert (forms["default"][0][~mask] == 0).all()


@pytest.mark.parametrize("T", [1, 7, 19])
def test_gradients_are_those_of_the_function(name, T):
    op, g = CAUSAL[name], generator(T)
    inputs = [x.requires_grad_() for x in op.make(g, 2, T, torch.float64)]
    state = op.run(op.make(g, 2, 3, torch.float64))[1]
    leaves = [
        t.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        for _, t in state.tensors()
        if t.is_floating_point()
    ]
    mask, reset = flags(g, 2, T, 0.8), flags(g, 2, T, 0.2)

    def function(*tensors):
        floats = iter(tensors[len(inputs) :])
        before = state.map(lambda t: next(floats) if t.is_floating_point() else t)
        y, after = op.run(list(tensors[: len(inputs)]), state=before, mask=mask, reset=reset)
        return y, *(t for _, t in after.tensors() if t.is_floating_point())

    assert torch.autograd.gradcheck(function, (*inputs, *leaves), fast_mode=True)


@pytest.mark.parametrize("T", [5, 17, 70])
def test_gradients_of_reference_and_chunks_agree(name, T):
    op, g = CAUSAL[name], generator(T)
    inputs = [x.requires_grad_() for x in op.make(g, 2, T, torch.float64)]
    state = op.run(op.make(g, 2, 3, torch.float64))[1].detach()
    mask, reset = flags(g, 2, T, 0.8), flags(g, 2, T, 0.1)
    direction = None
    gradients = {}
    for backend in ("reference", *op.backends, None):
        y, _ = op.run(inputs, backend, state=state, mask=mask, reset=reset)
        if direction is None:
            direction = torch.randn(y.shape, generator=g, dtype=y.dtype)
        gradients[backend] = torch.autograd.grad((y * direction).sum(), inputs)
    # Where a softmax is saturated the gradient to its logits is the rounding of others': one scale for all inputs.
    expected = torch.cat([x.flatten() for x in gradients["reference"]])
    for backend, grads in gradients.items():
        assert_close(torch.cat([x.flatten() for x in grads]), expected, 1e-9, what=str(backend))


@pytest.mark.parametrize("T", [5, 18, 67])
def test_the_future_changes_no_bit_of_the_past(name, T):
    op, g = CAUSAL[name], generator(T)
    inputs = op.make(g, 2, T, torch.float32)
    for t in (0, T // 2, T - 2):
        changed = [
            torch.cat([x[:, : t + 1], 1e3 * y[:, t + 1 :]], 1)
            for x, y in zip(inputs, op.make(g, 2, T, torch.float32), strict=True)
        ]
        for backend in ("reference", *op.backends, None):
            before, after = (op.run(x, backend)[0] for x in (inputs, changed))
            assert torch.equal(before[:, : t + 1], after[:, : t + 1])
            assert not torch.equal(before, after)
