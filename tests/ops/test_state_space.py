"""Diagonal state-space models: by FFT, by scans and as a convolution written out."""

import pytest
import torch

from latte.ops import ComplexState, state_space
from latte.ops.complex_scan import unit_circle
from latte.ops.state_space import state_space_fft, state_space_scanned
from latte.tokens import Tokens
from tests.ops.helpers import assert_close, generator, normal

D, N = 3, 4


def model(dtype=torch.float64):
    g = generator(0)
    return [x.to(dtype) for x in (-0.03 * normal(g, D, N).abs(), 3 * normal(g, D, N), normal(g, D, N, 2))]


@pytest.mark.parametrize("T", [1, 65, 200])
@pytest.mark.usefixtures("each_backend")
def test_it_is_the_convolution_with_its_kernel(T):
    z, (log_r, theta, read) = normal(generator(1), 2, T, D), model()
    a = torch.view_as_complex((log_r.exp()[..., None] * unit_circle(theta)).contiguous())
    power = torch.arange(T)[:, None, None]
    kernel = 2 * (torch.view_as_complex(read) * a**power).real.sum(-1)
    lag = torch.arange(T)[:, None] - torch.arange(T)
    taps = torch.where((lag >= 0)[..., None], kernel[lag.clamp(min=0)], 0.0)
    y, after = state_space(z, log_r, theta, read)
    assert_close(y, torch.einsum("tsd,bsd->btd", taps, z))
    h = torch.einsum("tdn,btd->bdn", a ** (T - 1 - power), z.to(a.dtype))
    assert_close(after.h_BPZ, torch.view_as_real(h).flatten(1, 2))


@pytest.mark.parametrize("T", [65, 128, 129, 300, 1000])
def test_fft_and_scans_agree_with_their_gradients(T):
    g = generator(T)
    weights = normal(g, 2, T, D), normal(g, 2, D * N, 2)
    leaves = [x.requires_grad_() for x in (normal(g, 2, T, D), *model(), normal(g, 2, D * N, 2))]
    results = []
    for form in (state_space_fft, state_space_scanned):
        y, after = form(*leaves[:4], ComplexState(leaves[4]), Tokens.of(leaves[0]))
        loss = (y * weights[0]).sum() + (after.h_BPZ * weights[1]).sum()
        results.append([y, after.h_BPZ, *torch.autograd.grad(loss, leaves)])
    for got, expected in zip(*results, strict=True):
        assert_close(got, expected, 1e-9)


def test_no_output_by_fft_meets_a_later_token():
    """Not even as rounding, which one FFT of the row would bring."""
    z, parameters = normal(generator(2), 1, 300, D).requires_grad_(), model()
    state, tokens = ComplexState.empty(z, D * N), Tokens.of(z)
    y, _ = state_space_fft(z, *parameters, state, tokens)
    for t in (0, 63, 64, 127, 128, 190, 256):
        (slope,) = torch.autograd.grad(y[:, t].sum(), z, retain_graph=True)
        assert (slope[:, t + 1 :] == 0).all()
        assert (slope[:, t] != 0).all()
    changed = z.detach().clone()
    changed[:, 190:] = 1e6
    assert torch.equal(state_space_fft(changed, *parameters, state, tokens)[0][:, :190], y[:, :190])


@pytest.mark.parametrize("form", [state_space_fft, state_space_scanned])
def test_memory_is_linear_in_the_length(form):
    def kept(T):
        sizes, parameters = [], [x.requires_grad_() for x in model(torch.float64)]
        z = normal(generator(3), 1, T, D).requires_grad_()
        count = torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x)
        with count:
            form(z, *parameters, ComplexState.empty(z, D * N), Tokens.of(z))
        return sum(sizes)

    short, long = kept(1024), kept(4096)
    assert long < 5.5 * short  # a few more levels of FFTs, each linear
