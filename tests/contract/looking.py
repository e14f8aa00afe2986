"""Points 8 and 9 of the contract: weights that can be looked at, autocast, and torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from latte.mixers import Mixer
from tests.contract.cases import (
    SHORT,
    Case,
    H,
    after,
    deterministic,
    inputs,
    seeds,
)
from tests.ops.helpers import assert_close, assert_states_close, flags, generator

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
