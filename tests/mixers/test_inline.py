"""InLine attention against its weights written out, and what sets it apart from a division."""

import pytest
import torch

from latte.mixers import MixerConfig, build
from latte.tokens import Tokens
from tests.mixers.oracle import perturbed
from tests.ops.helpers import assert_close, flags, generator, normal

pytestmark = pytest.mark.usefixtures("each_backend")
D, H, T = 8, 2, 19


def mixer(bidirectional, **options):
    config = MixerConfig(hidden_size=D, num_heads=H, bidirectional=bidirectional, options=options)
    return perturbed(build("inline", config).double())


@pytest.mark.parametrize("features", ["identity", "relu"])
@pytest.mark.parametrize("bidirectional", [False, True])
@torch.no_grad()
def test_weights_are_shifted_to_sum_to_1(bidirectional, features):
    module, g = mixer(bidirectional, features=features), generator(0)
    x, mask, reset = normal(g, 2, T, D), flags(g, 2, T, 0.8), flags(g, 2, T, 0.1)
    tokens = Tokens.of(x, mask=mask, reset=reset)
    q, k, v = (p(x).unflatten(-1, (H, -1)).transpose(1, 2) for p in (module.q_proj, module.k_proj, module.v_proj))
    if features == "relu":
        q, k = q.relu(), k.relu()
    seen = tokens.seen_BTS(causal=not bidirectional)[:, None].double()
    n = seen.sum(-1, keepdim=True).clamp(min=1)
    scores = seen * (q @ k.mT) / (D / H) ** 0.5
    weights = seen * (scores - scores.sum(-1, keepdim=True) / n + 1) / n
    expected = tokens.zero_padding(module.o_proj((weights @ v).transpose(1, 2).flatten(2)))
    assert_close(module(x, tokens=tokens)[0], expected)
    found = module.look(x, tokens)["weights"].values.sum(-1)
    assert_close(found, mask[:, None].double().expand(2, H, T).contiguous(), what="sums of weights")


def test_twice_the_query_gives_other_weights():
    module, x = mixer(True, features="relu"), normal(generator(0), 1, T, D)
    before = module.look(x)["weights"].values
    with torch.no_grad():
        module.q_proj.weight.mul_(2)
    assert (module.look(x)["weights"].values - before).abs().amax() > 1e-3
