"""Projections: the same numbers and gradients whichever library multiplies."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from latte.ops import product
from latte.ops.product import MANY, project

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture
def multiplied(monkeypatch):
    """Large products by oneDNN on any processor; the shapes of those it has computed."""
    shapes = []
    apply = product._Product.apply
    monkeypatch.delenv("LATTE_BACKEND", raising=False)
    monkeypatch.setattr(product, "prefers_onednn", lambda: True)
    monkeypatch.setattr(product._Product, "apply", lambda a, b: shapes.append((*a.shape, len(b))) or apply(a, b))
    return shapes


def close(found, expected):
    return (found - expected).abs().max() < 2e-5 * expected.abs().max()


@needs_onednn
@pytest.mark.parametrize("width", [96, 320])  # of the output: the gradient of the weight is computed from either side
def test_large_products_and_their_gradients(multiplied, width):
    torch.manual_seed(0)
    x = torch.randn(2, 160, 192).transpose(0, 1).requires_grad_()
    weight = torch.randn(width, 192, requires_grad=True)
    slope = torch.randn(160, 2, width)
    assert x.numel() * width >= MANY
    y = project(x, weight)
    dx, dweight = torch.autograd.grad(y, (x, weight), slope)
    assert len(multiplied) == 3
    assert dweight.is_contiguous()
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    y64 = F.linear(*exact)
    for found, expected in zip((y, dx, dweight), (y64, *torch.autograd.grad(y64, exact, slope.double())), strict=True):
        assert close(found, expected)


@needs_onednn
def test_gradients_of_gradients(multiplied):
    torch.manual_seed(0)
    x, weight = torch.randn(256, 128, requires_grad=True), torch.randn(160, 128, requires_grad=True)

    def second(multiply, x, weight):
        (dx,) = torch.autograd.grad(multiply(x, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), (x, weight))

    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    for found, expected in zip(second(project, x, weight), second(F.linear, *exact), strict=True):
        assert close(found, expected)
    assert multiplied


@needs_onednn
def test_parts_of_wider_matrices(multiplied):
    """As the gradient of a concatenation gives them."""
    torch.manual_seed(0)
    x, weight, slope = torch.randn(256, 300)[:, :128], torch.randn(160, 128), torch.randn(256, 999)[:, 5:165]
    leaves = x.requires_grad_(), weight.requires_grad_()
    exact = [t.detach().double().requires_grad_() for t in leaves]
    found = torch.autograd.grad(project(*leaves), leaves, slope)
    for got, expected in zip(found, torch.autograd.grad(F.linear(*exact), exact, slope.double()), strict=True):
        assert close(got, expected)
    assert len(multiplied) == 3


@needs_onednn
def test_a_frozen_weight_gets_no_gradient(multiplied):
    x, weight = torch.randn(256, 128, requires_grad=True), torch.randn(160, 128)
    project(x, weight).sum().backward()
    assert multiplied == [(256, 128, 160), (256, 160, 128)]


def test_small_or_double_products_are_left_to_torch(multiplied):
    for shape, dtype in (((64, 64), torch.float32), ((4096, 64), torch.float64)):
        x, weight = torch.randn(*shape, dtype=dtype), torch.randn(64, 64, dtype=dtype)
        assert torch.equal(project(x, weight), F.linear(x, weight))
    assert not multiplied
