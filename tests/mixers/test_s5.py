"""S5 against its recurrence in torch's complex numbers, and against the real state-space model it diagonalises."""

import itertools
import math

import pytest
import torch

from latte.layers.marks import marks_of
from latte.mixers import MixerConfig, build
from latte.mixers.s5 import hippo
from latte.models import LatteForCausalLM, preset
from latte.tokens import Tokens
from tests.ops.helpers import assert_close, flags, generator, normal

D = 8


def mixer(bidirectional=False, moved=0.5, seed=0, **options):
    """A mixer in float64, its parameters moved away from where they start."""
    torch.manual_seed(seed)
    options = {"state_size": 12, "num_blocks": 3, **options}
    config = MixerConfig(hidden_size=D, num_heads=1, bidirectional=bidirectional, options=options)
    module, g = build("s5", config).double(), generator(seed + 1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(moved * normal(g, *parameter.shape))
    return module


def states(module, u, h=None):
    """h_1, h_2, ... (T, P/2) of one document (T, D), one token after another, from the equations."""
    Lambda = torch.complex(-1e-4 - module.log_rate.exp(), module.frequency)
    step = module.log_step.exp()
    a = torch.exp(Lambda * step)
    E = ((a - 1) / Lambda)[:, None] * torch.view_as_complex(module.in_weight)
    h, out = torch.zeros_like(a) if h is None else h, []
    for token in u:
        h = a * h + E @ token.to(a.dtype)
        out.append(h)
    return torch.stack(out)


def layer(module, u, h=None):
    """The layer on one document, from its states on."""
    x = states(module, u, h)
    if module.config.bidirectional:
        x = torch.cat([x, states(module, u.flip(0)).flip(0)], dim=-1)
    y = 2 * (x @ torch.view_as_complex(module.out_weight).T).real + module.skip * u
    if module.options.activation == "none":
        return y
    z = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    gate = torch.sigmoid(z @ module.gate_proj.weight.T + module.gate_proj.bias)
    return gate * (z if module.options.activation == "half_glu1" else y)


@pytest.mark.parametrize("activation", ["half_glu1", "half_glu2", "none"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.usefixtures("each_backend")
def test_the_layer_is_the_recurrence_on_each_document_without_its_padding(bidirectional, activation):
    module, g, T = mixer(bidirectional, activation=activation), generator(0), 70
    x, mask, reset = normal(g, 3, T, D), flags(g, 3, T, 0.8), flags(g, 3, T, 0.08)
    y, _ = module(x, tokens=Tokens.of(x, mask=mask, reset=reset))
    document, expected = reset.long().cumsum(1), torch.zeros_like(x)
    for row in range(3):
        for number in document[row].unique():
            tokens = ((document[row] == number) & mask[row]).nonzero()[:, 0]
            if len(tokens):
                expected[row, tokens] = layer(module, x[row, tokens])
    assert_close(y, expected)
    assert_close(module(x)[0], torch.stack([layer(module, row) for row in x]), what="plain rows")


@pytest.mark.usefixtures("each_backend")
def test_a_carried_state_is_the_pairs_of_the_recurrence():
    module, x = mixer(), normal(generator(0), 2, 40, D)
    state, outputs = None, []
    for start, stop in itertools.pairwise((0, 1, 17, 18, 40)):
        y, state = module(x[:, start:stop], state)
        outputs.append(y)
        for row in range(2):
            assert_close(state.h_BPZ[row], torch.view_as_real(states(module, x[row, :stop])[-1]), what=f"state {stop}")
    assert_close(torch.cat(outputs, dim=1), torch.stack([layer(module, row) for row in x]))


def test_the_state_is_pairs_of_floats_of_constant_size():
    module = mixer().float()
    x = normal(generator(0), 2, 300, D, dtype=torch.float32)
    for T in (1, 300):
        state = module(x[:, :T])[1]
        assert state.h_BPZ.shape == (2, 6, 2)
        assert state.h_BPZ.dtype == torch.float32
        assert state.nbytes == 2 * 6 * 2 * 4
    assert module.growth == "constant"
    assert module.bfloat16()(x[:, :3].bfloat16())[1].h_BPZ.dtype == torch.float32


@pytest.mark.parametrize("size", [2, 8, 64])
def test_the_initial_eigenvalues_are_those_of_hippo(size):
    """-1/2 + i w in conjugate pairs: those of HiPPO-LegS plus its rank-one term, written out entry by entry."""
    A = torch.zeros(size, size, dtype=torch.float64)
    for n in range(size):
        for k in range(size):
            legs = -math.sqrt((2 * n + 1) * (2 * k + 1)) if n > k else -(n + 1.0) if n == k else 0.0
            A[n, k] = legs + math.sqrt(n + 0.5) * math.sqrt(k + 0.5)
    eigenvalues, vectors = hippo(size)
    assert (eigenvalues.real == -0.5).all()
    both = torch.cat([eigenvalues, eigenvalues.conj()])
    found = torch.linalg.eigvals(A)
    assert_close(found.real, torch.full((size,), -0.5, dtype=torch.float64), 1e-9)
    assert_close(both.imag.sort().values, found.imag.sort().values, 1e-9)
    assert_close(torch.view_as_real(A.to(vectors.dtype) @ vectors), torch.view_as_real(vectors * eigenvalues), 1e-9)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_new_layer_starts_from_blocks_of_hippo(bidirectional):
    module = mixer(bidirectional, moved=0.0, state_size=48, num_blocks=3, dt_min=0.01, dt_max=0.02)
    eigenvalues, vectors = hippo(16)
    rate = 1e-4 + module.log_rate.exp()
    assert_close(rate, torch.full_like(rate, 0.5), 1e-6)
    assert_close(module.frequency, eigenvalues.imag.repeat(3), 1e-6)
    step = module.log_step.exp()
    assert ((step >= 0.01) & (step <= 0.02)).all()
    # B was real before it was rotated: with the conjugate states it is again.
    weight = torch.view_as_complex(module.in_weight.detach()).unflatten(0, (3, 8))
    real = 2 * (vectors @ weight).real
    assert_close(torch.view_as_real(vectors.mH @ real.to(vectors.dtype)), torch.view_as_real(weight), 1e-6)
    assert real.std() == pytest.approx(48**-0.5, rel=0.15)
    assert module.out_weight.shape == (D, 48 if bidirectional else 24, 2)
    assert module.out_weight.detach().std() == pytest.approx(48**-0.5, rel=0.15)


@pytest.mark.usefixtures("each_backend")
def test_half_of_the_states_are_the_whole_real_model():
    """With one step for all states: x_t = e^{A s} x_{t-1} + A^{-1} (e^{A s} - 1) B u_t, y_t = C x_t, all real."""
    module, g, N, step = mixer(moved=0.0, state_size=6, num_blocks=1, activation="none"), generator(0), 6, 0.07
    B, C, u = normal(g, N, D), normal(g, D, N), normal(g, 1, 50, D)
    eigenvalues, vectors = hippo(N)
    with torch.no_grad():
        module.log_rate.fill_(math.log(0.5 - 1e-4))
        module.frequency.copy_(eigenvalues.imag)
        module.log_step.fill_(math.log(step))
        module.in_weight.copy_(torch.view_as_real(vectors.mH @ B.to(vectors.dtype)))
        module.out_weight.copy_(torch.view_as_real(C.to(vectors.dtype) @ vectors))
        module.skip.zero_()
    A = 2 * ((vectors * eigenvalues) @ vectors.mH).real
    decay = torch.matrix_exp(A * step)
    entry, x, expected = torch.linalg.solve(A, decay - torch.eye(N, dtype=A.dtype)) @ B, torch.zeros(N).double(), []
    for token in u[0]:
        x = decay @ x + entry @ token
        expected.append(C @ x)
    assert_close(module(u)[0][0], torch.stack(expected), 1e-9)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.usefixtures("each_backend")
def test_long_rows_in_float32_are_those_in_float64(bidirectional):
    """4096 tokens, parameters as drawn: hundreds of radians a token, and memories of a thousand tokens."""
    options = {"state_size": 256, "num_blocks": 1, "activation": "none"}
    narrow = mixer(bidirectional, moved=0.0, **options).float()
    wide = mixer(bidirectional, moved=0.0, **options).float().double()
    x = normal(generator(0), 1, 4096, D, dtype=torch.float32)
    expected, got = wide(x.double())[0], narrow(x)[0]
    assert_close(got, expected, 1e-5)
    results = []
    for module, y in ((wide, expected), (narrow, got)):
        direction = normal(generator(1), *y.shape).to(y.dtype)
        results.append(torch.autograd.grad((y * direction).sum(), list(module.parameters())))
    for (name, _), a, b in zip(wide.named_parameters(), *results, strict=True):
        assert_close(b, a, 1e-5, what=f"gradient to {name}")


def test_long_rows_token_by_token_in_float32_are_those_in_float64():
    narrow, wide = (mixer(moved=0.0, state_size=64, num_blocks=1).float().to(t) for t in (torch.float32, torch.float64))
    x, state, outputs = normal(generator(0), 1, 2048, D, dtype=torch.float32), None, []
    with torch.no_grad():
        expected = wide(x.double())[0]
        for t in range(x.shape[1]):
            y, state = narrow(x[:, t : t + 1], state)
            outputs.append(y)
    assert_close(torch.cat(outputs, dim=1), expected, 1e-5)


def test_state_space_parameters_learn_slowly_without_decay():
    marks = marks_of(mixer())
    assert set(marks) == {"log_rate", "frequency", "log_step", "in_weight"}
    for mark in marks.values():
        assert mark.decay is False
        assert mark.float32
        assert mark.learning_rate < 1


def test_the_preset_has_mixers_only():
    model = LatteForCausalLM(preset("s5", vocab_size=32))
    assert [block.roles for block in model.model.layers] == [["mixer"]] * 4
    assert (model.model.layers[0].mixer.log_rate.exp() - 0.5).abs().max() < 1e-3
    assert model(torch.arange(7)[None]).logits.shape == (1, 7, 32)


def test_options_that_make_no_sense_are_refused():
    for options, message in (
        ({"state_size": 9}, r"state_size is 9, expected a positive multiple of 2 num_blocks \(6\)"),
        ({"activation": "gelu"}, "activation is 'gelu', expected one of half_glu1, half_glu2, none"),
        ({"dt_min": 0.2}, "dt_min is 0.2 and dt_max is 0.1, expected 0 < dt_min <= dt_max"),
    ):
        with pytest.raises(ValueError, match=f"mixer 's5': {message}"):
            mixer(**options)
