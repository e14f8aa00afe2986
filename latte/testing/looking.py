"""Points 8 and 9 of the contract: weights that can be looked at, autocast, and torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from latte.layers.marks import marks_of
from latte.state import State
from latte.testing.cases import (
    SHORT,
    Case,
    H,
    Subject,
    after,
    deterministic,
    inputs,
    seeds,
)
from latte.testing.numbers import assert_close, assert_states_close, flags, generator
from latte.tokens import Tokens

# 8. Weights.


def check_weights(case: Case) -> None:
    """Where heads are linear in the values, the weights are 0 where t must not look and give the output.

    A normalised mixer's are p(s|t) besides: nonnegative, summing to 1.
    """
    mixer = case.build().mixer

    @deterministic
    @given(T=st.sampled_from(SHORT), seed=seeds, masked=st.booleans(), documents=st.booleans())
    def run(T: int, seed: int, masked: bool, documents: bool) -> None:
        g, B = generator(seed), 2
        mask = flags(g, B, T, 0.7) if masked else None
        reset = flags(g, B, T, 0.2) if documents else None
        x = inputs(seed, B, T)
        tokens = Tokens.of(x, mask=mask, reset=reset)
        view = mixer.look(x, tokens)["weights"]
        real, seen = tokens.real_BT, tokens.seen_BTS(causal=not case.bidirectional) & tokens.real_BT[:, :, None]
        assert view.kind == "weights"
        assert view.values.shape == (B, H, T, T)
        assert (view.values[~seen[:, None].expand_as(view.values)] == 0).all()
        assert view.normalised == mixer.normalised
        if mixer.normalised:
            assert (view.values >= 0).all()
            sums = real[:, None].double().expand(B, H, T).contiguous()
            assert_close(view.values.sum(-1), sums, what="sums of weights")
        values = mixer.values(x)
        values = values.repeat_interleave(H // values.shape[2], dim=2)
        y = mixer.project(torch.einsum("bhts,bshv->bthv", view.values, values), x)
        assert_close(tokens.zero_padding(y), mixer(x, tokens=tokens)[0], what="weights @ values, projected")

    run()


def check_views(case: Case) -> None:
    """Everything else there is to look at has a token's shape, and sums to 1 where it says so."""
    mixer, x = case.build().mixer, inputs(0, 2, 9)
    for name, view in mixer.look(x).items():
        assert torch.isfinite(view.values).all(), name
        lead = (2, H, 9) if view.kind == "weights" else (2, 9)
        assert view.values.shape[: len(lead)] == lead, name
        if view.normalised:
            assert (view.values >= 0).all(), name
            assert_close(view.values.sum(-1), torch.ones_like(view.values.sum(-1)), what=name)


# 9. torch.compile.


def check_autocast(case: Case) -> None:
    """Under autocast products are narrow, recurrences are not: near the exact result, and states go on."""
    mixer, x = case.build_narrow(), inputs(0, 2, 23, torch.float32)
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
        assert_states_close(without_spare_levels(got_state, state), state)


def without_spare_levels(state: State, like: State) -> State:
    """``state`` with as many levels (axes L) as ``like``; what it has more must be empty.

    How many levels are needed depends on the tokens' counts. A compiled graph can't look at them: it leaves room.
    """
    pairs = zip(state.leaves(), like.tensors(), strict=True)

    def cut(tensor: Tensor) -> Tensor:
        (path, _, axes), (_, other) = next(pairs)
        if "L" not in axes:
            return tensor
        used, spare = tensor.tensor_split([other.shape[axes.index("L")]], dim=axes.index("L"))
        assert (spare == 0).all(), path
        return used

    return state.map(cut)


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


def compile_inputs(case: Case, mixer: Subject, T: int) -> tuple[Tensor, dict[str, Any]]:
    g = generator(T)
    kwargs: dict[str, Any] = {"mask": flags(g, 2, T, 0.8), "reset": flags(g, 2, T, 0.1)}
    if not case.bidirectional:
        kwargs["state"] = after(mixer, 1, 2, 5, torch.float32)
    return inputs(0, 2, T, torch.float32), kwargs


def check_marks(case: Case) -> None:
    """Cast to bfloat16, what is marked stays in float32 to the last bit, and the mixer still reads."""
    wide = case.build(torch.float32)
    narrow = case.build(torch.float32).to(torch.bfloat16)
    marks = {name: mark for name, mark in marks_of(wide).items() if mark.float32}
    for (name, parameter), (_, before) in zip(narrow.named_parameters(), wide.named_parameters(), strict=True):
        if name in marks:
            assert parameter.dtype == torch.float32, name
            assert torch.equal(parameter, before), name
        else:
            assert parameter.dtype == torch.bfloat16, name
    x = inputs(0, 2, 7, torch.bfloat16)
    y, state = narrow(x)
    assert y.dtype == torch.bfloat16
    assert torch.isfinite(y).all()
    if state is not None:
        assert narrow(x, state)[0].dtype == torch.bfloat16
