"""The fused step of a layer against the same layer in torch, token by token."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from latte.decode import layer_step
from latte.layers.linear import Linear
from latte.mixers import MixerConfig, build
from latte.mixers.base import TOKEN_STEPS
from latte.mixers.latte import LatteMixer
from latte.ops import native
from latte.tokens import Tokens
from tests.ops.native.support import needs_library, relative

pytestmark = needs_library

LAYERS = [
    {},
    {"feed": "conv"},
    {"feed": "rglru", "window": 3},
    {"feed": "rglru", "window": 1, "slot0_bias": 1.5, "feed_norm": True},
    {"window": 0},
    {"window": 5, "rope": False, "softcap": 2.0},
    {"window": 2, "sinks": 3},
    {"feed": "rglru", "window": 4, "sinks": 1, "softcap": 4.0},
]


def layer(options: dict, heads: int, kv_heads: int, width: int, latents: int, dtype: torch.dtype) -> LatteMixer:
    torch.manual_seed(0)
    config = MixerConfig(
        hidden_size=heads * width,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        options={**options, "num_latents": heads * latents},
    )
    return build("latte", config).to(dtype).requires_grad_(False)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    options=st.sampled_from(LAYERS),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 1)]),
    width=st.sampled_from([2, 6, 8, 34]),
    latents=st.sampled_from([1, 3, 8, 17]),
    flags=st.booleans(),
)
def test_every_step_is_that_of_torch(options, heads, width, latents, flags):
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 2e-5)):
        mixer = layer(options, *heads, width, latents, dtype)
        random = torch.Generator().manual_seed(width)
        x = 2 * torch.randn(3, 12, heads[0] * width, generator=random).to(dtype)
        state = expected_state = mixer.init_state(x)
        count = torch.zeros(3, dtype=torch.long)
        with pytest.MonkeyPatch.context() as patch:
            for t in range(12):
                mask = torch.rand(3, 1, generator=random) < 0.8 if flags else None
                reset = torch.rand(3, 1, generator=random) < 0.2 if flags else None
                token = x[:, t : t + 1]
                tokens = Tokens.of(token, mask=mask, reset=reset, start=count)
                count = tokens.count_B
                patch.setenv("LATTE_BACKEND", "native")
                with torch.no_grad():
                    y, state = mixer(token, state, tokens)
                patch.setenv("LATTE_BACKEND", "torch")
                expected, expected_state = mixer(token, expected_state, tokens)
                assert relative(y, expected) < tolerance
                for (name, got), (_, wanted) in zip(state.tensors(), expected_state.tensors(), strict=True):
                    assert got.dtype == wanted.dtype
                    if name == "window.keys_BRGK" or name == "window.values_BRGV":
                        continue  # slots not in use may hold anything; the outputs show the others
                    assert relative(got, wanted) < tolerance, (t, name)


def test_the_state_that_was_given_stays_as_it_was():
    mixer = layer({"feed": "rglru", "window": 4, "sinks": 2}, 4, 2, 8, 4, torch.float32)
    x = torch.randn(2, 9, 32)
    with torch.no_grad():
        _, state = mixer(x[:, :8])
        kept = state.fork()
        tokens = Tokens.of(x[:, 8:], start=torch.tensor([8, 8]))
        first, after = mixer(x[:, 8:], state, tokens)
        second, again = mixer(x[:, 8:], state, tokens)
    assert torch.equal(first, second)
    for (name, a), (_, b) in zip(state.tensors(), kept.tensors(), strict=True):
        assert torch.equal(a, b), name
    for (name, a), (_, b) in zip(after.tensors(), again.tensors(), strict=True):
        assert torch.equal(a, b), name
        assert a.numel() == 0 or a.data_ptr() != dict(state.tensors())[name].data_ptr(), name


def test_it_serves_one_token_without_gradients_only(monkeypatch):
    mixer = layer({"window": 4}, 2, 2, 4, 4, torch.float32)
    calls = []
    kernel = native.macchiato_step
    monkeypatch.setattr(native, "macchiato_step", lambda *given: calls.append(1) or kernel(*given))
    assert TOKEN_STEPS[LatteMixer] is layer_step.latte_step
    x, state = torch.randn(1, 2, 8), mixer.init_state(torch.randn(1, 1, 8))
    one, two = (Tokens.of(part, start=torch.tensor([0])) for part in (x[:, :1], x))
    mixer(x[:, :1], state, one)  # gradients are enabled
    with torch.no_grad():
        mixer(x, state, two)
        monkeypatch.setenv("LATTE_BACKEND", "torch")
        mixer(x[:, :1], state, one)
        assert not calls
        monkeypatch.delenv("LATTE_BACKEND")
        mixer(x[:, :1], state, one)
    assert calls == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("K", [1, 7, 16, 130])
def test_products(B, K, dtype):
    random = torch.Generator().manual_seed(K)
    x = torch.randn(B, 2 * K, generator=random).to(dtype)[:, :K]
    weights = [torch.randn(n, K, generator=random).to(dtype) for n in (1, 5, 8, 33)]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for got, weight in zip(native.products(x, weights), weights, strict=True):
        assert relative(got, x.double() @ weight.double().T) < tolerance
    gate, up = weights[3], torch.randn(33, K, generator=random).to(dtype)
    expected = F.silu(x.double() @ gate.double().T) * (x.double() @ up.double().T)
    assert relative(native.gated_product(x, gate, up), expected) < tolerance


def test_threads_share_out_the_rows_of_a_large_product():
    x, weight = torch.randn(2, 512), torch.randn(3001, 512)
    (alone,), (shared,) = (native.products(x, [weight], threads) for threads in (1, 3))
    assert torch.equal(alone, shared)
    assert relative(shared, x.double() @ weight.double().T) < 1e-5


def test_wrapped_and_watched_projections_are_called():
    first, second = Linear(6, 4), Linear(6, 3)
    x, seen = torch.randn(2, 6), []
    with torch.no_grad():
        expected = [first(x), second(x)]
        handle = second.register_forward_hook(lambda *given: seen.append(1))
        for got, wanted in zip(layer_step._project(x, first, second), expected, strict=True):
            assert relative(got, wanted) < 1e-5
        handle.remove()
        handle = first.register_forward_pre_hook(lambda *given: seen.append(2))
        layer_step._project(x, first, second)
        handle.remove()
    assert seen == [1, 2]


def test_extreme_logits_stay_finite():
    mixer = layer({"feed": "rglru", "window": 3}, 2, 2, 8, 4, torch.float32)
    with torch.no_grad():
        for weight in mixer.parameters():
            weight.mul_(1e3)
        state = mixer.init_state(torch.zeros(1, 1, 16))
        for count in range(20):
            x = 1e2 * torch.randn(1, 1, 16)
            y, state = mixer(x, state, Tokens.of(x, start=torch.tensor([count])))
            assert torch.isfinite(y).all()
            assert all(torch.isfinite(tensor).all() for _, tensor in state.tensors())


def test_normalisers_go_on_counting_behind_many_tokens():
    """After n equal tokens the log-normaliser is log n: in single precision it would stop at 2^24, or drift before."""
    mixer = layer({}, 2, 2, 8, 17, torch.float32)
    mixer.latent_k_proj.weight.zero_()
    n, steps = 2**26, 2000
    with torch.no_grad():
        state = mixer.init_state(torch.zeros(1, 1, 16)).map(
            lambda tensor: torch.full_like(tensor, math.log(n)) if tensor.dtype == torch.float64 else tensor
        )
        for x in torch.randn(steps, 1, 1, 1, 16):
            _, state = mixer(x[0], state=state)
    grown = (state.latents.log_norm_BHM - math.log(n)).mul(n / steps)
    assert relative(grown, torch.ones_like(grown)) < 1e-4
