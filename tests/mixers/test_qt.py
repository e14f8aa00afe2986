"""QT attention against its weights written out, and beside the features it shares with Based."""

import pytest
import torch

from latte.mixers import MixerConfig, build
from latte.tokens import Tokens
from tests.mixers.oracle import perturbed
from tests.ops.helpers import assert_close, flags, generator, normal

pytestmark = pytest.mark.usefixtures("each_backend")
D, H, T = 8, 2, 19
K = D // H


def mixer(bidirectional=False, **options):
    config = MixerConfig(hidden_size=D, num_heads=H, bidirectional=bidirectional, options=options)
    return perturbed(build("qt", config).double())


def products(module, q, k):
    """phi(q) . phi(k) of heads (B, H, T, K), before they are divided by their sums."""
    kind = module.options.features
    if kind == "exact":
        r = q @ k.mT / K**0.5
        return 1 + r + r.square() / 2
    constant = module.constant[:, None, None].square()
    if kind == "fast":
        a = module.scale[:, None, None]
        return (a.square() * q.square() @ k.square().mT / K + 1 + constant) / 2
    q, k = (x.square() / x.square().norm(dim=-1, keepdim=True) for x in (q, k))
    return q @ k.mT + constant + 1e-6


@pytest.mark.parametrize("features", ["exact", "fast", "unit"])
@pytest.mark.parametrize("bidirectional", [False, True])
@torch.no_grad()
def test_weights_are_quadratic_in_the_products(bidirectional, features):
    module, g = mixer(bidirectional, features=features), generator(0)
    x, mask, reset = normal(g, 2, T, D), flags(g, 2, T, 0.8), flags(g, 2, T, 0.1)
    tokens = Tokens.of(x, mask=mask, reset=reset)
    q, k, v = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    weights = tokens.seen_BTS(causal=not bidirectional)[:, None] * products(module, q, k)
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-9)
    expected = tokens.zero_padding(module.o_proj((weights @ v).transpose(1, 2).flatten(2)))
    assert_close(module(x, tokens=tokens)[0], expected)


@torch.no_grad()
def test_exact_features_are_those_of_based():
    module, x = mixer(features="exact"), normal(generator(0), 2, T, D)
    based = build("linear", MixerConfig(D, H, options={"features": "based"})).double()
    based.load_state_dict(module.state_dict())
    assert_close(module(x)[0], based(x)[0])


@torch.no_grad()
def test_unit_features_are_nearly_flat():
    """At s = 1 no weight is more than twice another."""
    module, x = mixer(True, features="unit"), 100 * normal(generator(0), 2, T, D)
    module.constant.fill_(1.0)
    weights = module.look(x)["weights"].values
    assert (weights.amax(-1) / weights.amin(-1)).max() < 2


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="'qt': key_width is 0, expected at least 1"):
        mixer(key_width=0)
    with pytest.raises(ValueError, match="'qt': option features is 'slow', expected one of 'exact', 'fast', 'unit'"):
        mixer(features="slow")
