"""In-context linear estimation (Li, Rawat and Oymak, arXiv 2407.10005): what one layer learns from examples in a row.

A row holds n examples (x_i, y_i) of a linear task and a query (x, 0). Linear attention without features and denominator
is one step of gradient descent on them; with a filter over tokens (H3) or a decay, one that weighs samples. The closed
forms are those of docs/maths.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from latte import ops
from latte.mixers import MixerConfig, build, mixer_class, names
from latte.mixers.gla import GLAMixer
from latte.mixers.h3 import H3Mixer
from latte.tokens import Tokens
from tests.ops.helpers import generator, normal

PAGE = Path(__file__).parents[2] / "docs" / "maths.md"
D, N, NOISE, KEPT = 5, 15, 0.3, 0.85  # channels of x, examples, variance of the noise, correlation of successive tasks


# The closed forms.


def best_step(cov_x: Tensor, cov_task: Tensor, noise: float, count: int) -> tuple[Tensor, float]:
    """W* and L* of y^ = x^T W X^T y for x ~ N(0, cov_x), task ~ N(0, cov_task), by the eigenvectors of cov_x."""
    values, vectors = torch.linalg.eigh(cov_x)
    root, inverse = (vectors @ torch.diag(values**power) @ vectors.T for power in (0.5, -0.5))
    cov = root @ cov_task @ root
    M = cov.trace() + noise
    inner = torch.linalg.inv((count + 1) * torch.eye(len(cov)).double() + M * torch.linalg.inv(cov))
    return inverse @ inner @ inverse, float(M - count * (cov @ inner).trace())


def drifting(count: int = N) -> tuple[Tensor, Tensor]:
    """R and rho: correlations of the examples' tasks with each other, and with the query's."""
    place = torch.arange(1, count + 1).double()
    return KEPT ** (place[:, None] - place).abs(), KEPT ** (count + 1 - place)


def drifting_risk(weights_N: Tensor) -> float:
    """L(omega) of y^ = x^T X^T (omega . y) where tasks drift; x is isotropic."""
    R, rho = drifting()
    c = D + 1 + NOISE
    return float(D * (1 - 2 * rho @ weights_N + weights_N @ (R @ weights_N + c * weights_N)) + NOISE)


def best_weights() -> Tensor:
    """omega*."""
    R, rho = drifting()
    return torch.linalg.solve(R + (D + 1 + NOISE) * torch.eye(N).double(), rho)


def best_equal_risk() -> float:
    """The least risk with one weight for all samples."""
    R, rho = drifting()
    return float(D * (1 - rho.sum() ** 2 / (R.sum() + (D + 1 + NOISE) * N)) + NOISE)


# Tasks as rows of tokens.


def rows(tasks_BND: Tensor, cov_x: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """z (B, N + 1, D + 1), the query last with 0 for its y, and that y (B,); one task an example, the query's last."""
    root = torch.linalg.cholesky(cov_x)
    x = normal(g, *tasks_BND.shape) @ root.T
    y = (x * tasks_BND).sum(-1) + NOISE**0.5 * normal(g, *tasks_BND.shape[:2])
    seen = torch.cat([y[:, :-1], torch.zeros_like(y[:, :1])], dim=1)
    return torch.cat([x, seen[..., None]], dim=-1), y[:, -1]


def fixed_tasks(batch: int, g: torch.Generator, root: Tensor | None = None) -> Tensor:
    task = normal(g, batch, 1, D) if root is None else normal(g, batch, 1, D) @ root.T
    return task.expand(-1, N + 1, -1)


def drifting_tasks(batch: int, g: torch.Generator) -> Tensor:
    """An autoregression with variance 1: neighbours correlate by KEPT."""
    noise = normal(g, batch, N + 1, D)
    tasks = [noise[:, 0]]
    for i in range(1, N + 1):
        tasks.append(KEPT * tasks[-1] + (1 - KEPT**2) ** 0.5 * noise[:, i])
    return torch.stack(tasks, dim=1)


def one_step(z_BTD: Tensor, W: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """x^T W X^T (omega . y)."""
    X, y, x = z_BTD[:, :-1, :-1], z_BTD[:, :-1, -1], z_BTD[:, -1, :-1]
    y = y if weights_N is None else y * weights_N
    return torch.einsum("bd,de,bne,bn->b", x, W, X, y)


# Layers: unnormalised linear attention without features, its gates open or learned.


class Unnormed(GLAMixer):
    """Gated linear attention without the norm and the gate of its outputs."""

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        return self.o_proj(y_BTHV.flatten(2))


def linear_layer(open_gates: bool = True) -> Unnormed:
    config = MixerConfig(hidden_size=D + 1, num_heads=1, options={"key_fraction": 1.0, "gate_temperature": 1.0})
    layer = Unnormed(config).double()
    if open_gates:
        with torch.no_grad():
            layer.decay_proj[1].weight.zero_()
            layer.decay_proj[1].bias.fill_(1e4)  # sigmoid of it is 1, so nothing is forgotten
        layer.decay_proj.requires_grad_(False)
    return layer


def constructed(layer: Unnormed, W: Tensor) -> Unnormed:
    """q = W^T x, k = x, v = y, read into the last channel."""
    with torch.no_grad():
        for proj in (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj):
            proj.weight.zero_()
        layer.q_proj.weight[:D, :D] = W.T * layer.key_width**0.5
        layer.k_proj.weight[:D, :D] = torch.eye(D)
        layer.v_proj.weight[-1, -1] = layer.o_proj.weight[-1, -1] = 1.0
    return layer


def filter_layer(state_size: int = 2) -> H3Mixer:
    """H3 that reads x from all channels but the last and y from that one; its shift takes the present token."""
    config = MixerConfig(hidden_size=D + 1, num_heads=1, options={"state_size": state_size, "shift_size": 1})
    layer = H3Mixer(config).double()
    with torch.no_grad():
        for parameter in (layer.shift_weight, layer.skip, *layer.q_proj.parameters(), *layer.k_proj.parameters()):
            parameter.zero_()
        for parameter in (*layer.v_proj.parameters(), *layer.o_proj.parameters(), layer.frequency):
            parameter.zero_()
        layer.shift_skip.fill_(1.0)
        layer.q_proj.weight[:D, :D] = layer.k_proj.weight[:D, :D] = torch.eye(D)
        layer.v_proj.weight[:, -1] = 1.0
        layer.o_proj.weight[-1, :D] = 1.0
    return layer


def answer(layer: nn.Module, z_BTD: Tensor) -> Tensor:
    return layer(z_BTD)[0][:, -1, -1]


# (i) The construction.


@pytest.mark.usefixtures("each_backend")
def test_a_linear_layer_is_one_step_of_preconditioned_gradient_descent():
    g = generator(0)
    z, _ = rows(fixed_tasks(64, g), torch.eye(D).double(), g)
    W = normal(g, D, D)
    expected = one_step(z, W)
    error = answer(constructed(linear_layer(), W), z) - expected
    assert error.abs().max() <= 1e-12 * expected.abs().max()


def _bonus(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ops.bonus_attention(q, k, v, torch.zeros_like(q), torch.ones_like(q[0, 0]))[0]


def _levels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.ones(*q.shape[:3], 8, dtype=q.dtype)
    return ops.log_linear_attention(q, k, v, torch.zeros_like(q[..., 0]), weights)[0]


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize(
    "attention",
    [lambda *given: ops.decay_attention(*given)[0], ops.document_attention, _bonus, _levels],
    ids=["decay_attention", "document_attention", "bonus_attention", "log_linear_attention"],
)
def test_every_unnormalised_op_is_one_step_of_gradient_descent(attention):
    g = generator(1)
    z, _ = rows(fixed_tasks(64, g), torch.eye(D).double(), g)
    W = normal(g, D, D)
    q, k, v = z[..., :-1] @ W, z[..., :-1], z[..., -1:]
    read = attention(q[:, :, None], k[:, :, None], v[:, :, None])[:, -1, 0, 0]
    expected = one_step(z, W)
    assert (read - expected).abs().max() <= 1e-12 * expected.abs().max()


# (ii) The risk.


def risk(errors_B: Tensor) -> tuple[float, float]:
    """Mean square and its standard error."""
    squares = errors_B.square()
    return float(squares.mean()), float(squares.std() / len(squares) ** 0.5)


def covariances(isotropic: bool) -> tuple[Tensor, Tensor]:
    if isotropic:
        return torch.eye(D).double(), torch.eye(D).double()
    mixed = (normal(generator(2), D, 2 * D) / 3, normal(generator(3), D, 2 * D) / 3)
    return mixed[0] @ mixed[0].T, mixed[1] @ mixed[1].T


@pytest.mark.parametrize("isotropic", [True, False])
def test_the_best_step_has_the_risk_of_the_closed_form_and_no_other_less(isotropic):
    cov_x, cov_task = covariances(isotropic)
    W, least = best_step(cov_x, cov_task, NOISE, N)
    if isotropic:
        assert torch.allclose(W, torch.eye(D).double() / (N + D + 1 + NOISE))
    g = generator(4)
    z, y = rows(fixed_tasks(100_000, g, torch.linalg.cholesky(cov_task)), cov_x, g)
    with torch.no_grad():
        found, error = risk(answer(constructed(linear_layer(), W), z) - y)
    assert abs(found - least) < 3 * error
    assert error < 0.02 * least
    for seed in range(4):  # the same rows, so that the difference of two risks is known far better than each
        other = W + 0.2 * W.norm() * torch.nn.functional.normalize(normal(generator(seed), D, D), dim=(0, 1))
        more = (one_step(z, other) - y).square() - (one_step(z, W) - y).square()
        assert more.mean() > 3 * more.std() / len(more) ** 0.5


# (iii) Training.


def trained(layer: nn.Module, tasks, steps: int, rate: float) -> nn.Module:
    """Adam on fresh rows, its rate falling to 0."""
    parameters = [p for p in layer.parameters() if p.requires_grad]
    adam = torch.optim.Adam(parameters, lr=rate, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    g = generator(5)
    for _ in range(steps):
        z, y = rows(tasks(1024, g), torch.eye(D).double(), g)
        loss = (answer(layer, z) - y).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
    return layer


def excess(layer: nn.Module, tasks, best) -> tuple[float, float]:
    """By how much the risk exceeds that of the function ``best`` on the same rows, and the standard error of that."""
    g = generator(6)
    z, y = rows(tasks(100_000, g), torch.eye(D).double(), g)
    with torch.no_grad():
        more = (answer(layer, z) - y).square() - (best(z) - y).square()
    return float(more.mean()), float(more.std() / len(more) ** 0.5)


def test_training_finds_the_best_step_and_nothing_better():
    torch.manual_seed(0)
    layer = linear_layer()
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.3 * normal(generator(parameter.numel()), *parameter.shape))
    W, least = best_step(torch.eye(D).double(), torch.eye(D).double(), NOISE, N)
    start, _ = excess(layer, fixed_tasks, lambda z: one_step(z, W))
    assert start > 0.2 * least
    more, error = excess(trained(layer, fixed_tasks, 300, 0.02), fixed_tasks, lambda z: one_step(z, W))
    assert -3 * error < more < 0.02 * least


# (iv) Tasks that drift: sample weights.


def test_the_best_weights_have_the_risk_of_the_closed_form():
    weights = best_weights()
    least, R_rho = drifting_risk(weights), drifting()
    c = D + 1 + NOISE
    assert least == pytest.approx(
        float(D * (1 - R_rho[1] @ torch.linalg.inv(R_rho[0] + c * torch.eye(N).double()) @ R_rho[1]) + NOISE)
    )
    equal = R_rho[1].sum() / (R_rho[0].sum() + c * N) * torch.ones(N).double()
    assert drifting_risk(equal) == pytest.approx(best_equal_risk())
    g = generator(7)
    z, y = rows(drifting_tasks(100_000, g), torch.eye(D).double(), g)
    for given in (weights, equal):
        found, error = risk(one_step(z, torch.eye(D).double(), given) - y)
        assert abs(found - drifting_risk(given)) < 3 * error


@pytest.mark.usefixtures("each_backend")
def test_h3_weighs_samples_by_its_filter():
    """omega_i is the filter at the distance of example i from the query."""
    layer = filter_layer(state_size=4)
    with torch.no_grad():
        layer.frequency[:, 1] = 0.7 / layer.log_step.exp()
        layer.log_step.copy_(layer.log_step[0].expand(D + 1))
        layer.frequency.copy_(layer.frequency[:1].expand(D + 1, -1))
        layer.out_weight.copy_(layer.out_weight[:1].expand(D + 1, -1, -1))
    A = torch.complex(-1e-4 - layer.log_rate[0].exp(), layer.frequency[0])
    a = torch.exp(A * layer.log_step[0].exp())
    distance = torch.arange(N, 0, -1).double()[:, None]
    weights = 2 * (torch.view_as_complex(layer.out_weight[0]) * (a - 1) / A * a**distance).real.sum(-1)
    g = generator(8)
    z, _ = rows(drifting_tasks(64, g), torch.eye(D).double(), g)
    expected = one_step(z, torch.eye(D).double(), weights)
    assert (answer(layer, z) - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("kind", ["h3", "decay"])
def test_layers_that_forget_learn_to_weigh_samples(kind):
    """Better than equal weights can be, by four fifths of what the best weights win; nothing is better than those."""
    torch.manual_seed(0)
    layer: nn.Module
    if kind == "h3":
        layer = filter_layer()
        with torch.no_grad():  # from a filter that forgets 5% a token
            layer.log_step.fill_(-3.0)
            layer.log_rate.zero_()
            layer.out_weight.zero_()
            layer.out_weight[..., 0] = 0.5
    else:
        layer = constructed(linear_layer(open_gates=False), torch.eye(D).double() / 30)
        with torch.no_grad():
            layer.decay_proj[1].weight.zero_()
            layer.decay_proj[1].bias.fill_(3.0)  # the same
    weights, identity = best_weights(), torch.eye(D).double()
    least, equal = drifting_risk(weights), best_equal_risk()
    trained(layer, drifting_tasks, 250, 0.04)
    more, error = excess(layer, drifting_tasks, lambda z: one_step(z, identity, weights))
    assert -3 * error < more < 0.2 * (equal - least)


# (v) Negative controls: features and denominators.

CAUSAL = [name for name in names() if "causal" in mixer_class(name).directions]
NORMALISED = [name for name in CAUSAL if getattr(mixer_class(name), "normalised", False)]
WIDTH = 8  # of layers whose heads rotate pairs of halves; channels behind the task's are 0


@pytest.mark.parametrize("name", NORMALISED)
def test_normalised_layers_answer_within_their_values_whatever_their_weights(name):
    """A step of gradient descent grows with its query without bound; a mean of values does not leave their hull."""
    layer = build(name, MixerConfig(hidden_size=WIDTH, num_heads=1)).double()
    g = generator(9)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(normal(g, *parameter.shape))
    z, _ = rows(fixed_tasks(64, g), torch.eye(D).double(), g)
    far = z.clone()
    far[:, -1] *= 1e3
    x = torch.nn.functional.pad(far, (0, WIDTH - D - 1))
    values = far[..., -1:].expand(-1, -1, WIDTH)[:, :, None]
    with torch.no_grad():
        read = layer.mix_heads(x, values, layer.init_state(x), Tokens.of(x))[0][:, -1, 0, 0]
    lowest, highest = far[..., -1].aminmax(dim=1)
    assert (read >= lowest - 1e-9).all()
    assert (read <= highest + 1e-9).all()
    step = one_step(far, torch.eye(D).double())
    outside = (step < lowest) | (step > highest)
    assert outside.float().mean() > 0.9


def test_features_break_the_construction():
    g = generator(10)
    z, _ = rows(fixed_tasks(64, g), torch.eye(D).double(), g)
    W = normal(g, D, D)
    q, k, v = (x[:, :, None] for x in (z[..., :-1] @ W, z[..., :-1], z[..., -1:]))
    q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    expected = one_step(z, W)
    read = ops.decay_attention(q, k, v)[0][:, -1, 0, 0]
    assert (read - expected).abs().max() > 0.1 * expected.abs().max()


# The page.


def test_the_figures_of_the_page_are_those_of_the_closed_forms():
    found = re.findall(r"^\| .* \| \$[^|]*\$ \| ([\d.]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    identity = torch.eye(D).double()
    _, fixed = best_step(identity, identity, NOISE, N)
    assert found == [f"{figure:.3f}" for figure in (fixed, best_equal_risk(), drifting_risk(best_weights()))]
