"""The contract of a mixer, as functions of a case: a registered name with one set of its options.

Every mixer runs through every check that fits its direction, merely by being registered. :func:`run_contract` does the
same for one name, for mechanisms that live elsewhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from latte.mixers import Mixer, MixerConfig, build, mixer_class, names
from latte.ops.backends import NATIVE_OPS
from latte.ops.scan import ScanState
from latte.state import State
from tests.ops.helpers import TOLERANCE, assert_close, assert_states_close, flags, generator, normal

D, H = 8, 2
#: One token, odd lengths, and both sides of the edges of sub-blocks (16), chunks and runs (64).
LENGTHS = [1, 2, 5, 9, 15, 16, 17, 33, 63, 64, 65, 70]
SHORT = [1, 2, 5, 9, 17, 21]
DTYPES = [torch.float64, torch.float32]

deterministic = settings(derandomize=True, database=None, deadline=None, max_examples=8)
seeds = st.integers(0, 10**6)


@dataclasses.dataclass(frozen=True)
class Case:
    """A mixer's name and one of its ``examples``; keys of MixerConfig stand among the options."""

    name: str
    example: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.example)})"

    @property
    def bidirectional(self) -> bool:
        return bool(dict(self.example).get("bidirectional", False))

    def build(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Mixer:
        """The mixer, small, with all its parameters moved away from where they start."""
        cls, fields, options = mixer_class(self.name), {}, {}
        for key, value in self.example:
            (fields if key in MixerConfig.__dataclass_fields__ else options)[key] = value
        if "num_latents" in getattr(cls.Options, "__dataclass_fields__", {}):
            options.setdefault("num_latents", 4 * H)
        mixer = build(self.name, MixerConfig(hidden_size=D, num_heads=H, **fields, options=options)).to(dtype)
        g = generator(seed + 1)
        with torch.no_grad():
            for parameter in mixer.parameters():
                parameter.add_(0.5 * normal(g, *parameter.shape, dtype=dtype))
        return mixer


def cases(name: str | None = None) -> list[Case]:
    """Every example of every registered mixer, or of one."""
    wanted = names() if name is None else [name]
    return [Case(n, tuple(example.items())) for n in wanted for example in mixer_class(n).examples]


@contextmanager
def backend(name: str | None) -> Iterator[None]:
    """Every op that is asked to choose uses ``name``."""
    with mock.patch.dict(os.environ):
        os.environ.pop("LATTE_BACKEND", None)
        if name is not None:
            os.environ["LATTE_BACKEND"] = name
        yield


def inputs(seed: int, B: int, T: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(generator(seed), B, T, D, dtype=dtype)


def pieces(
    mixer: Mixer,
    x: Tensor,
    cuts: Any,
    state: State | None = None,
    mask: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    """The pieces between ``cuts``, one after the other, carrying the state."""
    edges = sorted({0, *(c for c in cuts if 0 < c < x.shape[1]), x.shape[1]})
    outputs = []
    for start, stop in itertools.pairwise(edges):
        part = (slice(None), slice(start, stop))
        y, state = mixer(
            x[part],
            state=state,
            mask=None if mask is None else mask[part],
            reset=None if reset is None else reset[part],
        )
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


def after(mixer: Mixer, seed: int, B: int, T: int, dtype: torch.dtype = torch.float64) -> State:
    """A state that has read ``T`` tokens."""
    return mixer(inputs(seed, B, T, dtype))[1].detach()


# 1. One function, however it is computed.


def check_forms(case: Case) -> None:
    """One pass = reference = step by step = pieces; outputs, final states, and what follows them."""
    mixers = {dtype: case.build(dtype) for dtype in DTYPES}

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
    def run(T, seed, carry, masked, documents, cuts, dtype):
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


def steps(mixer: Mixer, x: Tensor, state: State) -> tuple[Tensor, State]:
    outputs = []
    for t in range(x.shape[1]):
        y, state = mixer.step(x[:, t], state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


def check_reference(case: Case) -> None:
    """A bidirectional mixer: one pass = reference."""
    mixers = {dtype: case.build(dtype) for dtype in DTYPES}

    @deterministic
    @given(
        T=st.sampled_from(LENGTHS),
        seed=seeds,
        masked=st.booleans(),
        documents=st.booleans(),
        dtype=st.sampled_from(DTYPES),
    )
    def run(T, seed, masked, documents, dtype):
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
    def run(T, seed, masked, data):
        t = data.draw(st.integers(0, T - 2))
        x = inputs(seed, 2, T).requires_grad_()
        mask = flags(generator(seed), 2, T, 0.8) if masked else None
        y, _ = mixer(x, mask=mask)
        (gradient,) = torch.autograd.grad(y[:, t].sum(), x)
        assert (gradient[:, t + 1 :] == 0).all()
        if mask is None:
            assert (gradient[:, t] != 0).any()

    run()


def check_the_future_changes_no_bit_of_the_past(case: Case) -> None:
    mixer = case.build(torch.float32)

    @deterministic
    @given(T=st.sampled_from([2, 9, 17, 65, 70]), seed=seeds, size=st.sampled_from([1.0, 1e4]), data=st.data())
    def run(T, seed, size, data):
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
    mixers = {dtype: case.build(dtype) for dtype in DTYPES}

    @deterministic
    @given(
        T=st.sampled_from([2, 5, 9, 17, 33, 70]),
        where=st.sampled_from(["left", "right", "inside", "anywhere"]),
        seed=seeds,
        dtype=st.sampled_from(DTYPES),
    )
    def run(T, where, seed, dtype):
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
    def run(T, seed, size, documents):
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
    def run(real, pads, seed):
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
    mixers = {dtype: case.build(dtype) for dtype in DTYPES}

    @deterministic
    @given(
        lengths=st.lists(st.sampled_from([1, 2, 3, 7, 16, 18]), min_size=2, max_size=4),
        masked=st.booleans(),
        carry=st.booleans(),
        seed=seeds,
        dtype=st.sampled_from(DTYPES),
    )
    def run(lengths, masked, carry, seed, dtype):
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
            if mask is None:
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
            leaves = [] if state is None else [t.clone() for _, t in state.tensors() if t.is_floating_point()]
            leaves = [t.contiguous().requires_grad_() for t in leaves if t.numel()]

            def function(x, *rest, state=state, mask=mask, reset=reset):
                floats = iter(rest[len(named) :])
                before = None
                if state is not None:
                    before = state.map(lambda t: next(floats) if t.is_floating_point() and t.numel() else t)
                parameters = dict(zip(named, rest[: len(named)], strict=True))
                y, end = torch.func.functional_call(
                    mixer, parameters, (x,), {"state": before, "mask": mask, "reset": reset}
                )
                if end is None:
                    return (y,)
                # An empty sum's log is a constant too far away for differences.
                tensors = (t for _, t in end.tensors() if t.is_floating_point() and t.numel())
                return y, *(torch.where(t < -1e29, 0.0, t) for t in tensors)

            assert torch.autograd.gradcheck(function, (x, *named.values(), *leaves), fast_mode=True), T


# 6. Large numbers, long rows.


def check_large_logits_are_finite(case: Case) -> None:
    """Inputs, then weights, 1e4 times larger: outputs, states and gradients are numbers, and weights still sum to 1."""
    for factor in ("inputs", "weights"):
        mixer = case.build(torch.float32)
        if factor == "weights":
            with torch.no_grad():
                for parameter in mixer.parameters():
                    if parameter.dim() > 1:
                        parameter.mul_(1e4)
        for T in (1, 21, 70):
            x = inputs(T, 2, T, torch.float32)
            x = (1e4 * x if factor == "inputs" else x).requires_grad_()
            y, state = mixer(x)
            assert torch.isfinite(y).all(), factor
            for path, tensor in [] if state is None else state.tensors():
                assert torch.isfinite(tensor).all(), path
            gradients = torch.autograd.grad((y / y.detach().abs().max()).sum(), [x, *mixer.parameters()])
            for gradient in gradients:
                assert torch.isfinite(gradient).all(), factor
        if mixer.normalised:
            # In float64: float32 itself is as coarse as 1e-3 at 1e4.
            rows = mixer.double().weights(x.double()).tokens_BHTS.sum(-1)
            assert_close(rows, torch.ones_like(rows), 1e-5, what=f"sums of weights, large {factor}")


def check_state_size(case: Case) -> None:
    """The same after 10 and after 3000 tokens, unless the mixer says that it grows."""
    mixer = case.build(torch.float32)
    x = inputs(0, 1, 3000, torch.float32)
    with torch.no_grad():
        _, few = mixer(x[:, :10])
        _, many = mixer(x)
    if mixer.constant_state:
        assert few.nbytes == many.nbytes == mixer.init_state(x).nbytes > 0
        shapes = [[tuple(t.shape) for _, t in s.tensors()] for s in (few, many)]
        assert shapes[0] == shapes[1]
    else:
        assert few.nbytes < many.nbytes


# 7. States as values.


def check_state_is_a_value(case: Case) -> None:
    """Saved and loaded bit by bit, forked, rolled back, and never changed by what reads it."""
    mixer = case.build(torch.float32)
    state = after(mixer, 0, 3, 7, torch.float32)
    kept = state.fork()
    for (_, tensor), (_, copy) in zip(state.tensors(), kept.tensors(), strict=True):
        assert tensor.numel() == 0 or tensor.data_ptr() != copy.data_ptr()
    x, other = inputs(1, 3, 5, torch.float32), inputs(2, 3, 5, torch.float32)
    y, _ = mixer(x, state=state)
    steps(mixer, other, state)
    assert torch.equal(mixer(x, state=state)[0], y), "rolled back"
    for (path, tensor), (_, copy) in zip(state.tensors(), kept.tensors(), strict=True):
        assert torch.equal(tensor, copy), f"{path} was changed by reading on"
    with tempfile.TemporaryDirectory() as folder:
        state.save(Path(folder) / "state")
        loaded = State.load(Path(folder) / "state")
    assert type(loaded) is type(state)
    saved = dict(loaded.tensors())
    assert saved.keys() == dict(state.tensors()).keys()
    for path, tensor in state.tensors():
        assert tensor.dtype == saved[path].dtype, path
        assert torch.equal(tensor, saved[path]), path
    assert torch.equal(mixer(x, state=loaded)[0], y), "loaded"


def check_state_rows(case: Case) -> None:
    """Selecting, reordering and repeating rows of a state is the same as doing it to what was read."""
    mixer = case.build()
    x, more = inputs(0, 3, 7), inputs(1, 4, 3)
    _, state = mixer(x)
    assert state.batch_size == 3
    index = torch.tensor([2, 0, 0, 1])
    _, reordered = mixer(x[index])
    assert_states_close(state.select(index), reordered)
    assert_close(mixer(more, state=state.select(index))[0], mixer(more, state=reordered)[0])
    _, repeated = mixer(x.repeat_interleave(2, 0))
    assert_states_close(state.repeat(2), repeated)


def check_foreign_states_are_refused(case: Case) -> None:
    mixer = case.build(torch.float32)
    x, state = inputs(0, 2, 3, torch.float32), after(mixer, 0, 2, 3, torch.float32)
    with pytest.raises(ValueError, match=r"is a ScanState, expected an? \w+"):
        mixer(x, state=ScanState(torch.zeros(2, D)))
    with pytest.raises(ValueError, match=r"has shape \(3, .*expected \(2, "):
        mixer(x, state=after(mixer, 0, 3, 3, torch.float32))
    with pytest.raises(ValueError, match=r"torch.float16.*, expected .*torch.float(32|64)"):
        mixer(x, state=state.map(lambda t: t.half() if t.is_floating_point() else t))
    with pytest.raises(ValueError, match=r"on meta, expected .*cpu"):
        mixer(x, state=state.to("meta"))


def check_states_of_no_use_are_refused(case: Case) -> None:
    """A bidirectional mixer has no state to continue from."""
    with pytest.raises(ValueError, match="a state was given, expected none: it is bidirectional"):
        case.build()(inputs(0, 2, 3), state=ScanState(torch.zeros(2, D)))


def check_bad_inputs_are_refused(case: Case) -> None:
    mixer, x = case.build(), inputs(0, 2, 3)
    wrong: list[tuple[str, Tensor, Mapping[str, Tensor]]] = [
        (r"x has shape \(3, 8\), expected 3 axes", x[0], {}),
        (r"x has width 7, expected hidden_size 8", x[..., :7], {}),
        (r"x has shape \(2, 0, 8\): axis T is empty, expected at least 1", x[:, :0], {}),
        (r"x has dtype torch.int64, expected a floating-point dtype", x.long(), {}),
        (r"mask has shape \(2, 4\), expected \(B=2, T=3\)", x, {"mask": torch.ones(2, 4, dtype=torch.bool)}),
        (r"mask has dtype torch.float32, expected torch.bool", x, {"mask": torch.ones(2, 3)}),
        (r"mask is on meta, but x is on cpu", x, {"mask": torch.ones(2, 3, dtype=torch.bool, device="meta")}),
        (r"reset has shape \(1, 3\), expected \(B=2, T=3\)", x, {"reset": torch.ones(1, 3, dtype=torch.bool)}),
        (r"reset has dtype torch.int64, expected torch.bool", x, {"reset": torch.ones(2, 3, dtype=torch.long)}),
    ]
    for message, tensor, kwargs in wrong:
        with pytest.raises(ValueError, match=f"mixer '{case.name}': {message}"):
            mixer(tensor, **kwargs)


# 8. Weights.


def check_weights(case: Case) -> None:
    """A normalised mixer shows p(s|t): nonnegative, summing to 1, 0 where t must not look, giving the output."""
    mixer = case.build()

    @deterministic
    @given(T=st.sampled_from(SHORT), seed=seeds, masked=st.booleans(), documents=st.booleans())
    def run(T, seed, masked, documents):
        g, B = generator(seed), 2
        mask = flags(g, B, T, 0.7) if masked else None
        reset = flags(g, B, T, 0.2) if documents else None
        x = inputs(seed, B, T)
        tokens, values, latents = mixer.weights(x, mask=mask, reset=reset)
        real = torch.ones(B, T, dtype=torch.bool) if mask is None else mask
        document = torch.zeros(B, T, dtype=torch.long) if reset is None else reset.long().cumsum(1)
        seen = (document[:, :, None] == document[:, None, :]) & real[:, None, :] & real[:, :, None]
        if not case.bidirectional:
            seen = seen.tril()
        assert tokens.shape == (B, H, T, T)
        assert (tokens >= 0).all()
        assert (tokens[~seen[:, None].expand_as(tokens)] == 0).all()
        assert_close(tokens.sum(-1), real[:, None].double().expand(B, H, T).contiguous(), what="sums of weights")
        values = values.repeat_interleave(H // values.shape[2], dim=2)
        y = mixer.project(torch.einsum("bhts,bshv->bthv", tokens, values), x)
        assert_close(y, mixer(x, mask=mask, reset=reset)[0], what="weights @ values, projected")
        if latents is not None:
            assert latents.shape[:3] == (B, T, H)
            assert (latents >= 0).all()
            assert_close(latents.sum(-1)[real], torch.ones_like(latents.sum(-1)[real]), what="sums of p(l|t)")

    run()


def check_weights_are_denied(case: Case) -> None:
    with pytest.raises(ValueError, match="is not normalised: it has no weights to show"):
        case.build().weights(inputs(0, 1, 2))


# 9. torch.compile.


def check_autocast(case: Case) -> None:
    """Under autocast products are narrow, recurrences are not: near the exact result, and states go on."""
    mixer, x = case.build(torch.float32), inputs(0, 2, 23, torch.float32)
    wanted, _ = mixer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, state = mixer(x)
        assert_close(found.float(), wanted, 0.05, what="one pass")
        if state is not None:
            first, state = mixer(x[:, :11])
            second, _ = mixer(x[:, 11:], state=state)
            assert_close(torch.cat([first, second], dim=1).float(), wanted, 0.05, what="two parts")


def check_compile(case: Case, compiler: str = "aot_eager") -> None:
    """fullgraph=True, with mask, documents and a carried state: outputs and final states as without it."""
    mixer = case.build(torch.float32)
    x, kwargs = compile_inputs(case, mixer, 9)
    torch._dynamo.reset()
    compiled = torch.compile(mixer, fullgraph=True, backend=compiler)
    with torch.no_grad():
        (y, state), (got, got_state) = mixer(x, **kwargs), compiled(x, **kwargs)
    assert_close(got, y)
    assert type(got_state) is type(state)
    if state is not None:
        assert_states_close(got_state, state)


def check_compiled_gradients(case: Case) -> None:
    """The same for gradients to inputs and parameters. Slow: for a few cases."""
    mixer = case.build(torch.float32)
    x, kwargs = compile_inputs(case, mixer, 9)
    x.requires_grad_()
    torch._dynamo.reset()
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    expected, gradients = (
        torch.cat([t.flatten() for t in torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])])
        for y in (mixer(x, **kwargs)[0], compiled(x, **kwargs)[0])
    )
    assert_close(gradients, expected)


def compile_inputs(case: Case, mixer: Mixer, T: int) -> tuple[Tensor, dict[str, Any]]:
    g = generator(T)
    kwargs: dict[str, Any] = {"mask": flags(g, 2, T, 0.8), "reset": flags(g, 2, T, 0.1)}
    if not case.bidirectional:
        kwargs["state"] = after(mixer, 1, 2, 5, torch.float32)
    return inputs(0, 2, T, torch.float32), kwargs


CAUSAL: tuple[Callable[[Case], None], ...] = (
    check_forms,
    check_gradient_to_the_future_is_zero,
    check_the_future_changes_no_bit_of_the_past,
    check_state_size,
    check_state_is_a_value,
    check_state_rows,
    check_foreign_states_are_refused,
)
BIDIRECTIONAL: tuple[Callable[[Case], None], ...] = (check_reference, check_states_of_no_use_are_refused)
BOTH: tuple[Callable[[Case], None], ...] = (
    check_padding,
    check_pads_say_nothing,
    check_mask_invariance,
    check_packing,
    check_gradients,
    check_large_logits_are_finite,
    check_bad_inputs_are_refused,
    check_autocast,
    check_compile,
)


def checks(case: Case) -> list[Callable[[Case], None]]:
    """The checks that a case must pass."""
    weights = check_weights if mixer_class(case.name).normalised else check_weights_are_denied
    return [*(BIDIRECTIONAL if case.bidirectional else CAUSAL), *BOTH, weights]


def run_contract(name: str) -> None:
    """Run the whole contract for every example of the mixer registered as ``name``."""
    for case in cases(name):
        for check in checks(case):
            check(case)


__all__ = ["BIDIRECTIONAL", "BOTH", "CAUSAL", "TOLERANCE", "Case", "cases", "checks", "run_contract"]
