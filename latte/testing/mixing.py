"""Points 1 to 6 of the contract: one function of the tokens, however they are cut, padded, packed or scaled."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from latte.mixers import mixer_class
from latte.ops.registry import NATIVE_OPS
from latte.state import State, require_state
from latte.testing.cases import (
    DTYPES,
    LENGTHS,
    SHORT,
    Case,
    D,
    Subject,
    after,
    backend,
    deterministic,
    inputs,
    pieces,
    seeds,
    steps,
)
from latte.testing.numbers import assert_close, assert_states_close, flags, generator, normal

# 0. An answer.


def check_call(case: Case) -> None:
    """A plain call gives outputs like the input, and a causal mixer the state after it, of init_state's kind."""
    subject = case.build(torch.float32)
    x = inputs(0, 2, 5, torch.float32)
    y, state = subject(x)
    assert y.shape == x.shape, f"outputs have shape {tuple(y.shape)}, expected {tuple(x.shape)}"
    assert y.dtype == x.dtype, f"outputs are {y.dtype}, expected {x.dtype}"
    if case.bidirectional:
        assert state is None, "a state was returned, expected None: it is bidirectional"
        return
    assert state is not None, "no state was returned, expected one: it is causal"
    require_state("the state after 5 tokens", state, subject.init_state(x))


# 1. One function, however it is computed.


def check_forms(case: Case) -> None:
    """One pass = reference = step by step = pieces; outputs, final states, and what follows them."""
    mixers = case.build_all()

    @deterministic
    @given(
        T=st.sampled_from(LENGTHS),
        seed=seeds,
        carry=st.booleans(),
        masked=st.booleans(),
        documents=st.booleans(),
        cuts=st.sets(st.integers(1, 69), max_size=4),
        dtype=st.sampled_from(DTYPES),
    )
    def run(T: int, seed: int, carry: bool, masked: bool, documents: bool, cuts: set[int], dtype: torch.dtype) -> None:
        mixer, g, B = mixers[dtype], generator(seed), 2
        x, more = inputs(seed, B, T, dtype), inputs(seed + 1, B, 3, dtype)
        mask = flags(g, B, T, 0.7) if masked else None
        reset = flags(g, B, T, 0.15) if documents else None
        state = after(mixer, seed + 2, B, 6, dtype) if carry else None
        with backend("reference"):
            y, end = pieces(mixer, x, (), state, mask, reset)
            following, _ = mixer(more, state=end)
        forms = {}
        for name in [None, "torch"] if NATIVE_OPS else [None]:
            with backend(name):
                forms[f"one pass, {name or 'default'} backend"] = pieces(mixer, x, (), state, mask, reset)
                forms[f"pieces, {name or 'default'} backend"] = pieces(mixer, x, cuts, state, mask, reset)
        if T <= 17:
            forms["token by token"] = pieces(mixer, x, range(T), state, mask, reset)
        if T <= 17 and mask is None and reset is None:
            forms["step"] = steps(mixer, x, mixer.init_state(x) if state is None else state)
        for form, (other, state_after) in forms.items():
            assert_close(other, y, what=form)
            if reset is None:
                assert_states_close(state_after, end)
            # After a document's start a state may hold anything behind it: what follows shows that it is right.
            assert_close(mixer(more, state=state_after)[0], following, what=f"what follows {form}")

    run()


def check_reference(case: Case) -> None:
    """A bidirectional mixer: one pass = reference."""
    mixers = case.build_all()

    @deterministic
    @given(
        T=st.sampled_from(LENGTHS),
        seed=seeds,
        masked=st.booleans(),
        documents=st.booleans(),
        dtype=st.sampled_from(DTYPES),
    )
    def run(T: int, seed: int, masked: bool, documents: bool, dtype: torch.dtype) -> None:
        g, x = generator(seed), inputs(seed, 2, T, dtype)
        mask = flags(g, 2, T, 0.7) if masked else None
        reset = flags(g, 2, T, 0.15) if documents else None
        with backend("reference"):
            y, _ = mixers[dtype](x, mask=mask, reset=reset)
        for name in [None, "torch"] if NATIVE_OPS else [None]:
            with backend(name):
                other, state = mixers[dtype](x, mask=mask, reset=reset)
            assert_close(other, y, what=f"{name or 'default'} backend")
            assert state is None

    run()


# 2. Causal.


def check_gradient_to_the_future_is_zero(case: Case) -> None:
    mixer = case.build()

    @deterministic
    @given(T=st.sampled_from([2, 5, 17, 21]), seed=seeds, masked=st.booleans(), data=st.data())
    def run(T: int, seed: int, masked: bool, data: st.DataObject) -> None:
        t = data.draw(st.integers(0, T - 2))
        x = inputs(seed, 2, T).requires_grad_()
        mask = flags(generator(seed), 2, T, 0.8) if masked else None
        y, _ = mixer(x, mask=mask)
        (gradient,) = torch.autograd.grad(y[:, t].sum(), x)
        assert (gradient[:, t + 1 :] == 0).all()
        if mask is None and not (t == 0 and mixer_class(case.name).silent_start):
            assert (gradient[:, t] != 0).any()

    run()


def check_the_future_changes_no_bit_of_the_past(case: Case) -> None:
    mixer = case.build(torch.float32)

    @deterministic
    @given(T=st.sampled_from([2, 9, 17, 65, 70]), seed=seeds, size=st.sampled_from([1.0, 1e4]), data=st.data())
    def run(T: int, seed: int, size: float, data: st.DataObject) -> None:
        t = data.draw(st.integers(0, T - 2))
        x = inputs(seed, 2, T, torch.float32)
        other = torch.cat([x[:, : t + 1], size * inputs(seed + 1, 2, T, torch.float32)[:, t + 1 :]], dim=1)
        before, changed = mixer(x)[0], mixer(other)[0]
        assert torch.equal(before[:, : t + 1], changed[:, : t + 1])
        assert not torch.equal(before, changed)

    run()


# 3. Padding.


def check_padding(case: Case) -> None:
    """Left, right, interior and mixed padding: real tokens give what they give without it, pads nothing at all."""
    mixers = case.build_all()

    @deterministic
    @given(
        T=st.sampled_from([2, 5, 9, 17, 33, 70]),
        where=st.sampled_from(["left", "right", "inside", "anywhere"]),
        seed=seeds,
        dtype=st.sampled_from(DTYPES),
    )
    def run(T: int, where: str, seed: int, dtype: torch.dtype) -> None:
        mixer, g, place = mixers[dtype], generator(seed), torch.arange(T)
        start = torch.randint(1, T, (3, 1), generator=g)
        mask = {
            "left": place >= start,
            "right": place < start,
            "inside": (place < start) | (place == T - 1),
            "anywhere": flags(g, 3, T, 0.6),
        }[where]
        x = inputs(seed, 3, T, dtype)
        y, state = mixer(x, mask=mask)
        for row in range(3):
            if mask[row].any():
                alone, alone_state = mixer(x[row, mask[row]][None])
                assert_close(y[row, mask[row]][None], alone, what=f"row {row}")
                if state is not None:
                    more = inputs(seed + 1, 1, 3, dtype)
                    row_state = state.select(torch.tensor([row]))
                    following = mixer(more, state=row_state)[0]
                    assert_close(following, mixer(more, state=alone_state)[0], what=f"what follows row {row}")
        assert (y[~mask] == 0).all()

    run()


def check_pads_say_nothing(case: Case) -> None:
    """Other pads, large ones too, change no bit of the output or of what follows; the gradient to them is 0."""
    mixer = case.build(torch.float32)

    @deterministic
    @given(T=st.sampled_from(SHORT), seed=seeds, size=st.sampled_from([1.0, 1e4]), documents=st.booleans())
    def run(T: int, seed: int, size: float, documents: bool) -> None:
        g, B = generator(seed), 2
        mask = flags(g, B, T, 0.6)
        reset = flags(g, B, T, 0.2) if documents else None
        x = inputs(seed, B, T, torch.float32).requires_grad_()
        other = torch.where(mask[..., None], x, size * inputs(seed + 1, B, T, torch.float32))
        (y, state), (changed, other_state) = (mixer(z, mask=mask, reset=reset) for z in (x, other))
        assert torch.equal(y, changed)
        if state is not None:
            more = inputs(seed + 2, B, 3, torch.float32)
            assert torch.equal(mixer(more, state=state)[0], mixer(more, state=other_state)[0])
        (gradient,) = torch.autograd.grad(y.square().sum(), x)
        assert (gradient[~mask] == 0).all()
        assert torch.isfinite(gradient).all()

    run()


def check_mask_invariance(case: Case) -> None:
    """The same tokens in the same order, with the pads elsewhere."""
    mixer = case.build()

    @deterministic
    @given(real=st.integers(1, 19), pads=st.integers(1, 9), seed=seeds)
    def run(real: int, pads: int, seed: int) -> None:
        g, T = generator(seed), real + pads
        tokens, outputs = inputs(seed, 1, real), []
        for _ in range(3):
            mask = torch.zeros(1, T, dtype=torch.bool)
            mask[0, torch.randperm(T, generator=g)[:real]] = True
            x = normal(g, 1, T, D)
            x[mask] = tokens[0]
            outputs.append(mixer(x, mask=mask)[0][mask])
        assert_close(outputs[1], outputs[0])
        assert_close(outputs[2], outputs[0])

    run()


# 4. Packing.


def check_packing(case: Case) -> None:
    """Documents packed in one row give what they give alone, and no gradient passes between them."""
    mixers = case.build_all()

    @deterministic
    @given(
        lengths=st.lists(st.sampled_from([1, 2, 3, 7, 16, 18]), min_size=2, max_size=4),
        masked=st.booleans(),
        carry=st.booleans(),
        seed=seeds,
        dtype=st.sampled_from(DTYPES),
    )
    def run(lengths: list[int], masked: bool, carry: bool, seed: int, dtype: torch.dtype) -> None:
        mixer, g, T = mixers[dtype], generator(seed), sum(lengths)
        ends = torch.tensor(lengths).cumsum(0).tolist()
        spans = [slice(end - n, end) for n, end in zip(lengths, ends, strict=True)]
        reset = torch.zeros(1, T, dtype=torch.bool)
        # The first document may continue what a state has read; every other begins with a reset.
        state = after(mixer, seed + 1, 1, 6, dtype) if carry and not case.bidirectional else None
        reset[0, [span.start for span in spans[1 if state is not None else 0 :]]] = True
        mask = flags(g, 1, T, 0.7) if masked else None
        x = inputs(seed, 1, T, dtype).requires_grad_()
        y, _ = mixer(x, state=state, mask=mask, reset=reset)
        for i, span in enumerate(spans):
            part = None if mask is None else mask[:, span]
            alone, _ = mixer(x[:, span], state=state if i == 0 else None, mask=part)
            assert_close(y[:, span].detach(), alone.detach(), what=f"document {i}")
            (gradient,) = torch.autograd.grad(y[:, span].square().sum(), x, retain_graph=True)
            assert (gradient[:, : span.start] == 0).all()
            assert (gradient[:, span.stop :] == 0).all()
            if mask is None and not (span.stop - span.start == 1 and mixer_class(case.name).silent_start):
                assert (gradient[:, span] != 0).any()

    run()


# 5. Gradients.


def check_gradients(case: Case) -> None:
    """Of outputs and final state to inputs, parameters and initial state, against differences, in float64."""
    mixer = case.build()
    named = dict(mixer.named_parameters())
    for T in (1, 5, 19):
        for hard in (False, True):
            g, x = generator(T), inputs(T, 2, T).requires_grad_()
            mask, reset = (flags(g, 2, T, 0.8), flags(g, 2, T, 0.2)) if hard else (None, None)
            state = None if case.bidirectional or not hard else after(mixer, T + 1, 2, 3)
            leaves = [] if state is None else [t for path, t in state.tensors() if checked_by_gradient(path, t)]
            leaves = [t.clone().contiguous().requires_grad_() for t in leaves]

            def function(
                x: Tensor,
                *rest: Tensor,
                state: State | None = state,
                mask: Tensor | None = mask,
                reset: Tensor | None = reset,
            ) -> tuple[Tensor, ...]:
                floats = iter(rest[len(named) :])
                before = None
                if state is not None:
                    before = state.map(lambda t: next(floats) if checked_by_gradient("", t) else t)
                parameters = dict(zip(named, rest[: len(named)], strict=True))
                y, end = torch.func.functional_call(
                    mixer, parameters, (x,), {"state": before, "mask": mask, "reset": reset}
                )
                if end is None:
                    return (y,)
                # An empty sum's log is a constant too far away for differences.
                tensors = (t for path, t in end.tensors() if checked_by_gradient(path, t))
                return y, *(torch.where(t < -1e29, 0.0, t) for t in tensors)

            assert torch.autograd.gradcheck(function, (x, *named.values(), *leaves), fast_mode=True), T


def checked_by_gradient(path: str, leaf: Tensor) -> bool:
    """Whether a leaf of a state has a gradient to check; flags and counts are compared exactly instead (forms, rows).

    A leaf of any other kind would be checked by nothing: complex numbers belong into states as pairs of floats.
    """
    assert leaf.dtype in (torch.float32, torch.float64, torch.bool, torch.long), f"{path} is {leaf.dtype}"
    return leaf.is_floating_point() and leaf.numel() > 0


# 6. Large numbers, long rows.


def check_large_logits_are_finite(case: Case) -> None:
    """Inputs, then weights, 1e4 times larger: outputs, states and gradients are numbers, and weights still sum to 1."""
    large = {"inputs": case.build(torch.float32)} | {
        f"weights ({', '.join(n)})": _enlarged(case, n) for n in _large(case)
    }
    for factor, mixer in large.items():
        for T in (1, 21, 70):
            x = inputs(T, 2, T, torch.float32)
            x = (1e4 * x if factor == "inputs" else x).requires_grad_()
            y, state = mixer(x)
            assert torch.isfinite(y).all(), factor
            for path, tensor in [] if state is None else state.tensors():
                assert torch.isfinite(tensor).all(), path
            size = y.detach().abs().max()
            size = torch.where(size > 0, size, 1.0)  # gates may close altogether
            # The output of a document's first token may not depend on everything, such as the pace of forgetting.
            gradients = torch.autograd.grad((y / size).sum(), [x, *mixer.parameters()], materialize_grads=True)
            for gradient in gradients:
                assert torch.isfinite(gradient).all(), factor
        if getattr(mixer.mixer, "normalised", False):
            # In float64: float32 itself is as coarse as 1e-3 at 1e4.
            rows = mixer.mixer.double().look(x.double())["weights"].values.sum(-1)
            assert_close(rows, torch.ones_like(rows), 1e-5, what=f"sums of weights, large {factor}")


def _enlarged(case: Case, names: list[str], dtype: torch.dtype = torch.float32) -> Subject:
    mixer = case.build(dtype)
    with torch.no_grad():
        for name in names:
            mixer.get_parameter(name).mul_(1e4)
    return mixer


def _large(case: Case) -> list[list[str]]:
    """The matrices to enlarge together: all of them, or each alone where all at once would lead out of float32.

    A mixer that multiplies many projections of its input, each of the ones before, grows by 1e4 with every one.
    """
    names = [name for name, parameter in case.build().named_parameters() if parameter.dim() > 1]
    with torch.no_grad():
        y, _ = _enlarged(case, names, torch.float64)(inputs(0, 2, 21))
    return [names] if y.abs().max() < torch.finfo(torch.float32).max else [[name] for name in names]


def check_state_size(case: Case) -> None:
    """What the state's class says of its growth is so: the same size after 10 and 3000 tokens, or bounded by a log.

    And it holds no other memory, as a view of what was read would.
    """
    mixer = case.build(torch.float32)
    x = inputs(0, 1, 3000, torch.float32)
    with torch.no_grad():
        sizes = {T: mixer(x[:, :T])[1].nbytes for T in (10, 1500, 3000)}
        _, few = mixer(x[:, :10])
        _, many = mixer(x)
    for path, tensor in many.tensors():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, f"{path} is a part of something larger"
    shapes = [[tuple(t.shape) for _, t in s.tensors()] for s in (few, many)]
    if mixer.growth == "constant":
        assert sizes[10] == sizes[3000] == mixer.init_state(x).nbytes > 0
        assert shapes[0] == shapes[1]
    elif mixer.growth == "log":
        assert shapes[0] != shapes[1]
        assert sizes[3000] <= sizes[10] * 12 / 3  # levels: 12 bits of 3000 against more than 3 of 10
        assert sizes[3000] - sizes[1500] <= sizes[3000] / 8
    else:
        assert sizes[3000] > 1.9 * sizes[1500]
