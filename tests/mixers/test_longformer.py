"""Longformer against transformers' with the same weights, and against all pairs of tokens."""

import pytest
import torch
from transformers.models.longformer.configuration_longformer import LongformerConfig
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

from latte.mixers import MixerConfig, build
from latte.tokens import Tokens
from tests.mixers.oracle import perturbed
from tests.ops.helpers import assert_close, flags, generator, normal

pytestmark = pytest.mark.usefixtures("each_backend")
D, H, W, T = 8, 2, 4, 24


def mixer(**options):
    config = MixerConfig(hidden_size=D, num_heads=H, bidirectional=True, options={"window": W, **options})
    return perturbed(build("longformer", config))


NAMES = {
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "global_q_proj": "query_global",
    "global_k_proj": "key_global",
    "global_v_proj": "value_global",
}


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("global_tokens", [1, 3])
@torch.no_grad()
def test_it_is_transformers_longformer(global_tokens, padding):
    ours = mixer(global_tokens=global_tokens, rope=False)
    ours.o_proj = torch.nn.Identity()
    settings = LongformerConfig(
        hidden_size=D,
        num_attention_heads=H,
        num_hidden_layers=1,
        attention_window=[2 * W],
        attention_probs_dropout_prob=0.0,
    )
    theirs = perturbed(LongformerSelfAttention(settings, 0))
    for name, other in NAMES.items():
        getattr(ours, name).weight.copy_(getattr(theirs, other).weight)
        getattr(theirs, other).bias.zero_()
    x = normal(generator(0), 2, T, D, dtype=torch.float32)
    mask = torch.arange(T).expand(2, T) < T - padding
    seen_by_all = torch.arange(T).expand(2, T) < global_tokens
    flag = torch.where(mask, 0.0, -10000.0) + 10000.0 * seen_by_all
    expected = theirs(
        x, attention_mask=flag, is_index_masked=~mask, is_index_global_attn=seen_by_all, is_global_attn=True
    )[0]
    y = ours(x, tokens=Tokens.of(x, mask=mask))[0]
    assert_close(y[mask], expected[mask], 1e-5)


@pytest.mark.parametrize("global_tokens", [0, 2, 40])
def test_it_is_attention_over_pairs_that_see_each_other(global_tokens):
    module, g = mixer(global_tokens=global_tokens, rope=False).double(), generator(0)
    x, mask, reset = normal(g, 2, T, D), flags(g, 2, T, 0.8), flags(g, 2, T, 0.1)
    tokens = Tokens.of(x, mask=mask, reset=reset)
    place, seen = tokens.place_BT, tokens.seen_BTS(causal=False)
    near = (place[:, :, None] - place[:, None, :]).abs() <= W
    y = attention(module, x, seen & (near | (place < global_tokens)[:, None, :]), "{}_proj")
    if global_tokens:
        whole = attention(module, x, seen, "global_{}_proj")
        y = torch.where((place < global_tokens)[..., None], whole, y)
    assert_close(module(x, tokens=tokens)[0], tokens.zero_padding(module.o_proj(y)))


def attention(module, x, seen, names):
    q, k, v = (getattr(module, names.format(n))(x).unflatten(-1, (H, -1)).transpose(1, 2) for n in "qkv")
    weights = (q @ k.mT / (D / H) ** 0.5).masked_fill(~seen[:, None], -1e30).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="'longformer': window is -1, expected at least 0"):
        mixer(window=-1)
