"""Point 5 of the contract, continued: torch.func, forward mode and second derivatives are right or refused."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from latte.testing.cases import Case, Subject, backend, inputs
from latte.testing.numbers import assert_close, flags, generator

STEP = 1e-6
#: Of what central differences leave.
TOLERANCE = 1e-6


def check_directional_derivatives(case: Case) -> None:
    """torch.func.jvp of the output, and of its gradient, against differences of the reference."""
    mixer, x, direction = case.build(), inputs(0, 2, 9), inputs(1, 2, 9)

    def loss(x: Tensor) -> Tensor:
        return mixer(x)[0].square().sum()

    with backend("reference"):
        ahead, behind = (x + STEP * direction).requires_grad_(), (x - STEP * direction).requires_grad_()
        losses = loss(ahead), loss(behind)
        first = (losses[0] - losses[1]).detach() / (2 * STEP)
        gradients = torch.autograd.grad(losses[0], ahead)[0], torch.autograd.grad(losses[1], behind)[0]
        second = (gradients[0] - gradients[1]) / (2 * STEP)
    assert_close(jvp(loss, (x,), (direction,))[1], first, TOLERANCE, "jvp")
    assert_close(jvp(grad(loss), (x,), (direction,))[1], second, TOLERANCE, "jvp of the gradient")
    try:
        found = _second_derivative(mixer, x, direction)
    except (NotImplementedError, RuntimeError) as error:
        assert "first derivatives only" in str(error) or "is not implemented" in str(error)  # noqa: PT017
    else:
        assert_close(found, second, TOLERANCE, "gradient of the gradient")


def _second_derivative(mixer: Subject, x: Tensor, direction: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(mixer(x)[0].square().sum(), x, create_graph=True)
    return torch.autograd.grad((first * direction).sum(), x)[0]


def check_gradients_of_samples(case: Case) -> None:
    """vmap(grad(...)) gives the parameters' gradients of every row as if it were alone, padding and documents too."""
    mixer, x, g = case.build(), inputs(0, 3, 9), generator(0)
    mask, reset = flags(g, 3, 9, 0.8), flags(g, 3, 9, 0.2)
    parameters = {name: parameter.detach() for name, parameter in mixer.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, mask: Tensor, reset: Tensor) -> Tensor:
        given = {"mask": mask[None], "reset": reset[None]}
        return functional_call(mixer, parameters, (x[None],), given)[0].square().sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*performance drop.*")
        to_parameters, to_x = vmap(grad(loss, argnums=(0, 1)), in_dims=(None, 0, 0, 0))(parameters, x, mask, reset)
    for row in range(3):
        alone = x[row : row + 1].clone().requires_grad_()
        y, _ = mixer(alone, mask=mask[row : row + 1], reset=reset[row : row + 1])
        leaves = [alone, *mixer.parameters()]
        wanted = torch.autograd.grad(y.square().sum(), leaves, materialize_grads=True)
        for found, expected in zip((to_x, *to_parameters.values()), wanted, strict=True):
            assert_close(found[row].reshape(expected.shape), expected, 1e-9, f"row {row}")
