"""LINA against its equation written out, and documents that do not fit its table of gates."""

import pytest
import torch
import torch.nn.functional as F

from latte.mixers import MixerConfig, build
from latte.tokens import Tokens
from tests.mixers.oracle import perturbed
from tests.mixers.test_oracles import turned
from tests.ops.helpers import assert_close, flags, generator, normal

pytestmark = pytest.mark.usefixtures("each_backend")
D, H, T = 8, 2, 19


def mixer(**options):
    config = MixerConfig(hidden_size=D, num_heads=H, bidirectional=True, options=options)
    return build("lina", config).double()


def written_out(module, x):
    """One document (T, D)."""
    place = torch.arange(len(x))[None]
    q, k, v = (p(x).unflatten(-1, (H, -1)) for p in (module.q_proj, module.k_proj, module.v_proj))
    q, k = (turned(a[None], place)[0].relu() + 1e-6 for a in (q, k))
    g, f = F.softplus(module.key_gate) + 1e-6, module.value_gate
    heads = []
    for h in range(H):
        weights = (q[:, h] @ k[:, h].T) * g[: len(x), h]
        heads.append(weights / weights.sum(-1, keepdim=True) @ (f[: len(x), h, None] * v[:, h]))
    return module.o_proj(torch.cat(heads, -1))


@torch.no_grad()
def test_it_is_linear_attention_with_gates_of_places():
    module, g = perturbed(mixer(length=30)), generator(0)
    x, mask, reset = normal(g, 2, T, D), flags(g, 2, T, 0.8), flags(g, 2, T, 0.1)
    assert_close(module(x)[0], torch.stack([written_out(module, row) for row in x]))
    y, document = module(x, tokens=Tokens.of(x, mask=mask, reset=reset))[0], reset.long().cumsum(1)
    for row in range(2):
        for number in document[row].unique():
            real = (document[row] == number) & mask[row]
            if real.any():
                assert_close(y[row, real], written_out(module, x[row, real]), what=f"row {row}, document {number}")


@torch.no_grad()
def test_it_starts_as_normalised_linear_attention_and_gates_change_it():
    module, x = mixer(length=T), normal(generator(0), 2, T, D)
    start = module.look(x)["weights"].values
    assert_close(start.sum(-1), torch.ones(2, H, T).double(), 1e-6, what="sums of weights")
    module.value_gate[3] = 2.0
    assert_close(module.look(x)["weights"].values[..., 3], 2 * start[..., 3], what="a gate of values")
    module.key_gate[5] = -1e4
    assert module.look(x)["weights"].values[..., 5].abs().max() < 1e-5


def test_a_document_longer_than_the_table_is_refused():
    module, x = perturbed(mixer(length=10)), normal(generator(0), 1, 11, D)
    with pytest.raises(ValueError, match="'lina': a document has 11 tokens, expected at most length 10"):
        module(x)
    mask = torch.arange(11)[None] > 0
    assert_close(module(x, tokens=Tokens.of(x, mask=mask))[0][:, 1:], module(x[:, 1:])[0], what="10 and a pad")


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="'lina': length is 0, expected at least 1"):
        mixer(length=0)
    with pytest.raises(ValueError, match="'lina': head width is 3, expected a positive multiple of channels"):
        build("lina", MixerConfig(hidden_size=6, num_heads=2, bidirectional=True))
