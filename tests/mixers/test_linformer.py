"""Linformer against its equation written out, and documents that do not fit its table."""

import pytest
import torch

from latte.mixers import MixerConfig, build
from latte.tokens import Tokens
from tests.mixers.oracle import perturbed
from tests.ops.helpers import assert_close, flags, generator, normal

D, H, T, N = 8, 2, 19, 3


def mixer(**options):
    config = MixerConfig(hidden_size=D, num_heads=H, bidirectional=True, options={"slots": N, **options})
    return perturbed(build("linformer", config).double())


def written_out(module, x):
    """One document (T, D)."""
    heads = []
    q, k, v = (p(x).unflatten(-1, (H, -1)) for p in (module.q_proj, module.k_proj, module.v_proj))
    for h in range(H):
        E = module.key_mix[h % len(module.key_mix)][:, : len(x)]
        F = E if module.value_mix is None else module.value_mix[h % len(module.value_mix)][:, : len(x)]
        weights = (q[:, h] @ (E @ k[:, h]).T / (D / H) ** 0.5).softmax(-1)
        heads.append(weights @ (F @ v[:, h]))
    return module.o_proj(torch.cat(heads, -1))


@pytest.mark.parametrize("options", [{}, {"share_heads": False}, {"share_values": True}])
def test_it_is_attention_to_mixtures_of_keys_and_values(options):
    module, g = mixer(length=30, **options), generator(0)
    x, mask, reset = normal(g, 2, T, D), flags(g, 2, T, 0.8), flags(g, 2, T, 0.1)
    assert_close(module(x)[0], torch.stack([written_out(module, row) for row in x]))
    y, document = module(x, tokens=Tokens.of(x, mask=mask, reset=reset))[0], reset.long().cumsum(1)
    for row in range(2):
        for number in document[row].unique():
            real = (document[row] == number) & mask[row]
            if real.any():
                assert_close(y[row, real], written_out(module, x[row, real]), what=f"row {row}, document {number}")


def test_a_document_longer_than_the_table_is_refused():
    module, x = mixer(length=10), normal(generator(0), 1, 11, D)
    with pytest.raises(ValueError, match="'linformer': a document has 11 tokens, expected at most length 10"):
        module(x)
    mask = torch.arange(11)[None] > 0
    assert_close(module(x, tokens=Tokens.of(x, mask=mask))[0][:, 1:], module(x[:, 1:])[0], what="10 and a pad")


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="'linformer': slots is 0, expected at least 1"):
        mixer(slots=0)
