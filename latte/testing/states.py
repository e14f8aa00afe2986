"""Point 7 of the contract: states as values, and what is refused."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from latte.state import State, state
from latte.testing.cases import (
    Case,
    D,
    after,
    inputs,
    steps,
)
from latte.testing.numbers import assert_close, assert_states_close
from latte.tokens import Tokens


@state
class ForeignState(State):
    """Of no mechanism."""

    h_BD: Tensor


@contextmanager
def refused(message: str) -> Iterator[None]:
    """What is inside raises a ValueError whose text matches ``message``."""
    try:
        yield
    except ValueError as error:
        if re.search(message, str(error)):
            return
        raise AssertionError(f"refused with {str(error)!r}, expected {message!r}") from error
    raise AssertionError(f"nothing was refused, expected {message!r}")


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
    with refused(r"is a ForeignState, expected an? \w+"):
        mixer.mixer(x, ForeignState(torch.zeros(2, D)))
    with refused(r"has shape \(3, .*expected \(2, "):
        mixer.mixer(x, after(mixer, 0, 3, 3, torch.float32).layers[0][0])
    with refused(r"torch.float16.*, expected .*torch.float(32|64)"):
        mixer(x, state=state.map(lambda t: t.half() if t.is_floating_point() else t))
    with refused(r"on meta, expected .*cpu"):
        mixer(x, state=state.to("meta"))


def check_states_of_no_use_are_refused(case: Case) -> None:
    """A bidirectional mixer has no state to continue from."""
    with refused("a state was given, expected none: it is bidirectional"):
        case.build().mixer(inputs(0, 2, 3), ForeignState(torch.zeros(2, D)))


def check_bad_inputs_are_refused(case: Case) -> None:
    mixer, x = case.build(), inputs(0, 2, 3)
    wrong: list[tuple[str, Tensor, Mapping[str, Tensor]]] = [
        (r"x has shape \(3, 8\), expected 3 axes", x[0], {}),
        (r"x has width 7, expected hidden_size 8", x[..., :7], {}),
        (r"x has shape \(2, 0, 8\): axis T is empty, expected at least 1", x[:, :0], {}),
        (r"x has dtype torch.int64, expected a floating-point dtype", x.long(), {}),
        (r"mask has shape \(2, 4\), expected \(B=2, T=3\)", x, {"mask": torch.ones(2, 4, dtype=torch.bool)}),
        (r"mask has dtype torch.float32, expected torch.bool", x, {"mask": torch.ones(2, 3)}),
        (r"mask is on meta, but the input is on cpu", x, {"mask": torch.ones(2, 3, dtype=torch.bool, device="meta")}),
        (r"reset has shape \(1, 3\), expected \(B=2, T=3\)", x, {"reset": torch.ones(1, 3, dtype=torch.bool)}),
        (r"reset has dtype torch.int64, expected torch.bool", x, {"reset": torch.ones(2, 3, dtype=torch.long)}),
    ]
    for message, tensor, kwargs in wrong:
        with refused(f"mixer '{case.name}': {message}"):
            mixer(tensor, **kwargs)
    with refused(rf"mixer '{case.name}': tokens are of shape \(2, 4\), expected \(2, 3\)"):
        mixer.mixer(x, tokens=Tokens.of(inputs(0, 2, 4)))


def check_a_state_without_a_count(case: Case) -> None:
    """Called with a state alone, a mixer that needs the number of tokens read says so; the others don't need it."""
    mixer, x = case.build().mixer, inputs(0, 2, 9)
    tokens = Tokens.of(x[:, 5:], start=torch.tensor([5, 5]))
    _, state = mixer(x[:, :5])
    wanted, _ = mixer(x[:, 5:], state, tokens)
    try:
        found, _ = mixer(x[:, 5:], state)
    except ValueError as error:
        assert "without the number of tokens it has read" in str(error)  # noqa: PT017  (either is right)
    else:
        assert torch.equal(found, wanted)
