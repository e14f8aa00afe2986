"""ZeroS against its weights written out pair by pair, in float64."""

import pytest
import torch
import torch.nn.functional as F

from latte.mixers import MixerConfig, build
from latte.tokens import Tokens
from tests.ops.helpers import assert_close, generator, normal

pytestmark = pytest.mark.usefixtures("each_backend")
D, H = 8, 2


def weights(module, x):
    """r (B, H, T, S), which sum to 0 over s, and the unit queries and keys."""
    T = x.shape[1]
    u = module.u_proj(x).unflatten(-1, (H, -1))
    count = torch.arange(1, T + 1).double()[:, None, None]
    virtual = module.tau.exp()[:, None]
    mean = (virtual * module.mu + u.cumsum(1)) / (virtual + count)
    s = -(u * mean).sum(-1) / 2.0
    first, high = torch.sigmoid(module.gate_proj(x)).chunk(2, -1)
    r = torch.zeros(x.shape[0], H, T, T, dtype=torch.float64)
    for t in range(T):
        past = s[:, : t + 1]
        delta = past - past.mean(1, keepdim=True)
        rest = past.softmax(1) - (1 + delta) / (t + 1)
        r[:, :, t, : t + 1] = (first[:, t, None] * delta / (t + 1) + high[:, t, None] * rest).mT
    q, k = (F.normalize(p(x).unflatten(-1, (H, -1)), dim=-1) for p in (module.q_proj, module.k_proj))
    return r, q, k


def build_module(seed=0):
    module = build("zeros", MixerConfig(hidden_size=D, num_heads=H, options={"rope": False})).double()
    g = generator(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(normal(g, *parameter.shape))
    return module


def test_the_means_are_the_weights_written_out():
    module, x = build_module(), normal(generator(1), 2, 19, D)
    r, q, k = weights(module, x)
    assert_close(r.sum(-1), torch.zeros(2, H, 19, dtype=torch.float64))
    v = module.values(x)
    expected = torch.einsum("bhts,bthk,bshk,bshv->bthv", r, q, k, v)
    y, _ = module.mix_heads(x, v, None, Tokens.of(x))
    assert_close(y, expected)


def test_a_first_token_gives_zero():
    module, x = build_module(), normal(generator(1), 2, 5, D)
    assert (module(x)[0][:, 0] == 0).all()
    assert (module(x)[0][:, 1] != 0).any()


def test_a_large_later_logit_changes_no_earlier_output():
    """The released code subtracts the largest logit of the row: earlier weights underflow."""
    module, x = build_module(), normal(generator(1), 1, 9, D)
    changed = x.clone()
    changed[:, -1] *= 1e3
    assert torch.equal(module(x)[0][:, :-1], module(changed)[0][:, :-1])
