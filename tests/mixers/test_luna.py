"""Luna against its equations written out: packed, handed on to the next layer, and causal."""

import pytest
import torch
import torch.nn.functional as F

from latte.mixers import MixerConfig, build
from latte.tokens import Tokens
from tests.mixers.oracle import perturbed
from tests.ops.helpers import assert_close, flags, generator, normal

pytestmark = pytest.mark.usefixtures("each_backend")
D, H, P, T = 8, 2, 3, 19


def mixer(bidirectional=True, layer=0, layers=1, **options):
    config = MixerConfig(
        hidden_size=D,
        num_heads=H,
        bidirectional=bidirectional,
        layer_index=layer,
        num_layers=layers,
        options={"latents": P, **options},
    )
    return perturbed(build("luna", config).double())


def attention(q, k, v):
    q, k, v = (x.unflatten(-1, (H, -1)).transpose(0, 1) for x in (q, k, v))
    return ((q @ k.mT / (D / H) ** 0.5).softmax(-1) @ v).transpose(0, 1).flatten(1)


def packed(module, latents, x):
    """One document (T, D): outputs, and what the latents hold."""
    k = module.pack_k_proj(x)
    z = attention(module.pack_q_proj(latents), k, k if module.pack_v_proj is None else module.pack_v_proj(x))
    k = module.k_proj(z)
    y = attention(module.q_proj(x), k, k if module.v_proj is None else module.v_proj(z))
    return module.o_proj(y), z


@pytest.mark.parametrize("tie", [True, False])
def test_latents_pack_each_document_and_go_on_to_the_next_layer(tie):
    first, second = mixer(layers=2, tie=tie), mixer(layer=1, layers=2, tie=tie)
    g, carried = generator(0), {}
    x, mask, reset = normal(g, 2, T, D), flags(g, 2, T, 0.8), flags(g, 2, T, 0.1)
    tokens = Tokens.of(x, mask=mask, reset=reset)
    y, _ = first(x, tokens=tokens, carried=carried)
    y_2, _ = second(2 * x, tokens=tokens, carried=carried)
    document = reset.long().cumsum(1)
    for row in range(2):
        for number in document[row].unique():
            real = (document[row] == number) & mask[row]
            if real.any():
                expected, z = packed(first, first.latents, x[row, real])
                assert_close(y[row, real], expected, what=f"row {row}, document {number}")
                latents = F.layer_norm(first.latents + z, (D,), first.latent_norm.weight, first.latent_norm.bias, 1e-6)
                expected, _ = packed(second, latents + second.latents, 2 * x[row, real])
                assert_close(y_2[row, real], expected, what=f"second layer, row {row}, document {number}")


@pytest.mark.parametrize("tie", [True, False])
def test_a_causal_layer_takes_means_over_the_tokens_so_far(tie):
    module, x = mixer(bidirectional=False, tie=tie), normal(generator(0), 1, T, D)
    heads = {name: getattr(module, f"{name}_proj")(x[0]).unflatten(-1, (H, -1)) for name in ("pack_k", "q", "k")}
    v = heads["k"] if tie else module.v_proj(x[0]).unflatten(-1, (H, -1))
    latent, scale = module.pack_q_proj(module.latents).unflatten(-1, (H, -1)), (D / H) ** -0.5
    expected = torch.zeros(T, H, D // H).double()
    for h in range(H):
        a = torch.log2(1 + 2 ** (scale * heads["pack_k"][:, h] @ latent[:, h].T))
        for t in range(T):
            seen = slice(0, t + 1)
            share = (scale * heads["q"][t, h] @ heads["k"][seen, h].T @ a[seen] / (t + 1)).softmax(-1)
            expected[t, h] = share @ a[seen].T @ v[seen, h] / (t + 1)
    assert_close(module(x)[0][0], module.o_proj(expected.flatten(1)))
    assert module.init_state(x).nbytes == 8 * 2 * P * D


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="'luna': latents is 0, expected at least 1"):
        mixer(latents=0)
    with pytest.raises(ValueError, match="all heads together have width 6, expected hidden_size 8"):
        build("luna", MixerConfig(hidden_size=D, num_heads=H, head_dim=3, bidirectional=True, num_layers=2))
