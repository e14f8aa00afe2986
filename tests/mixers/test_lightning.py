"""Lightning attention against MiniMax of transformers, and against its sum written out."""

import pytest
import torch
import torch.nn.functional as F
from transformers import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

from latte.mixers import MixerConfig, build
from latte.mixers.lightning import slopes
from latte.tokens import Tokens
from tests.ops.helpers import assert_close, generator, normal

pytestmark = pytest.mark.usefixtures("each_backend")
D, H = 16, 4


def mixer(layer=0, layers=1, **options):
    config = MixerConfig(hidden_size=D, num_heads=H, layer_index=layer, num_layers=layers, options=options)
    return build("lightning", config)


@pytest.mark.parametrize(("layer", "layers"), [(0, 1), (1, 4), (3, 4)])
def test_it_is_the_layer_of_minimax(layer, layers):
    """Same weights, several blocks of theirs, then one token from the state."""
    T = 41
    theirs = MiniMaxLightningAttention(
        MiniMaxConfig(
            hidden_size=D, num_attention_heads=H, num_hidden_layers=layers, block_size=8, hidden_act="silu", head_dim=4
        ),
        layer,
    )
    ours = mixer(layer, layers, gate_rank=0, output_norm="rms")
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape))
        qkv = theirs.qkv_proj.weight.view(H, 3, D // H, D)
        for projection, weight in zip((ours.q_proj, ours.k_proj, ours.v_proj), qkv.unbind(1), strict=True):
            projection.weight.copy_(weight.reshape(D, D))
        ours.gate_proj.weight.copy_(theirs.output_gate.weight)
        ours.o_proj.weight.copy_(theirs.out_proj.weight)
        ours.norm.weight.copy_(theirs.norm.weight)
    x = torch.randn(2, T, D)
    expected, _ = theirs(x, None, None)
    y, _ = ours(x)
    assert_close(y, expected)
    _, state = ours(x[:, : T - 1])
    last, _ = ours(x[:, T - 1 :], state, Tokens.of(x[:, T - 1 :], start=torch.tensor([T - 1, T - 1])))
    assert_close(last, expected[:, -1:])


def test_it_is_a_sum_that_fades_by_lambda_per_head():
    T, layer, layers = 19, 1, 3
    module = mixer(layer, layers, gate_rank=3).double()
    x = normal(generator(0), 2, T, D)
    q, k, v = (F.silu(p(x)).unflatten(-1, (H, -1)) for p in (module.q_proj, module.k_proj, module.v_proj))
    distance = (torch.arange(T)[:, None] - torch.arange(T)).clamp(min=0).double()
    y = torch.zeros_like(v)
    for h in range(H):
        pace = 2.0 ** (-8 * (h + 1) / H) * (1 - layer / (layers - 1 + 1e-5) + 1e-5)
        y[:, :, h] = (q[:, :, h] @ k[:, :, h].mT * torch.exp(-pace * distance)).tril() @ v[:, :, h]
    y = F.layer_norm(y.flatten(2), (D,), module.norm.weight, None, 1e-6)
    first, second = module.gate_proj
    gate = torch.sigmoid(x @ first.weight.T @ second.weight.T)
    assert_close(module(x)[0], (y * gate) @ module.o_proj.weight.T)


def test_the_last_layer_hardly_forgets_and_slopes_exist_for_any_number_of_heads():
    assert torch.exp(mixer(5, 6).log_decay(torch.zeros(1))).min() > 0.9999
    assert slopes(8) == [2.0**-h for h in range(1, 9)]
    assert slopes(6)[:4] == slopes(4)
    assert slopes(6)[4:] == slopes(8)[:4:2]


def test_a_negative_rank_is_refused():
    with pytest.raises(ValueError, match="mixer 'lightning': gate_rank is -1, expected at least 0"):
        mixer(gate_rank=-1)
