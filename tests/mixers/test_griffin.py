"""Griffin against RecurrentGemma of transformers, and its options."""

import pytest
import torch
from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

from latte.mixers import MixerConfig, build
from latte.models import LatteConfig, LatteForCausalLM
from tests.ops.helpers import assert_close

D, H, LAYERS, WINDOW = 16, 2, 3, 5


def ours_like(theirs):
    """The same weights: their norms scale by 1 + weight, and their embedding is multiplied by sqrt(D)."""
    local = {"mixer": "local-attention", "options": {"window": WINDOW - 1}}
    config = LatteConfig(
        mixer="griffin",
        pattern=[["mixer", "geglu"], ["mixer", "geglu"], [local, "geglu"]],
        vocab_size=31,
        hidden_size=D,
        num_attention_heads=H,
        num_key_value_heads=1,
        num_hidden_layers=LAYERS,
        intermediate_size=24,
        tie_word_embeddings=False,
    )
    model = LatteForCausalLM(config).eval()
    names = {
        "temporal_block.linear_y": "mixer.y_proj",
        "temporal_block.linear_x": "mixer.x_proj",
        "temporal_block.linear_out": "mixer.out_proj",
        "temporal_block.conv_1d.weight": "mixer.conv_weight",
        "temporal_block.conv_1d.bias": "mixer.conv_bias",
        "temporal_block.rg_lru.recurrent_param": "mixer.lru.decay",
        "temporal_block.o_proj.bias": "mixer.out_bias",
        "temporal_block.": "mixer.",
        "mlp_block.": "mlp.",
        "temporal_pre_norm": "mixer_norm",
        "channel_pre_norm": "mlp_norm",
        "model.final_norm": "model.norm",
    }
    weights = {}
    for name, weight in theirs.state_dict().items():
        weight = 1 + weight if "norm" in name else weight
        for old, new in names.items():
            name = name.replace(old, new)
        weights[name] = weight[:, 0] if name.endswith("conv_weight") else weight
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * D**0.5
    for layer in range(LAYERS):
        for gates in ("weight", "bias"):
            parts = [f"model.layers.{layer}.mixer.rg_lru.{kind}_gate_{gates}" for kind in ("recurrent", "input")]
            if parts[0] in weights:
                weights[f"model.layers.{layer}.mixer.lru.gate_{gates}"] = torch.stack([weights.pop(p) for p in parts])
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not missing
    assert not unexpected
    return model


@pytest.mark.usefixtures("each_backend")
def test_logits_are_those_of_recurrentgemma():
    """Two recurrent blocks and one of local attention; the soft cap of logits is set out of reach."""
    torch.manual_seed(0)
    config = RecurrentGemmaConfig(
        num_hidden_layers=LAYERS,
        vocab_size=31,
        hidden_size=D,
        intermediate_size=48,
        num_attention_heads=H,
        lru_width=D,
        attention_window_size=WINDOW,
        conv1d_width=4,
        logits_soft_cap=1e6,
        block_types=["recurrent", "recurrent", "attention"],
        head_dim=D // H,
        num_key_value_heads=1,
    )
    theirs = RecurrentGemmaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    ids = torch.randint(0, 31, (2, 40))
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
        assert_close(ours_like(theirs)(ids, use_cache=False).logits, expected)


def test_bad_options_are_refused():
    config = {"hidden_size": 8, "num_heads": 2}
    with pytest.raises(ValueError, match=r"lru_width is 9, expected a positive multiple of num_heads \(2\)"):
        build("griffin", MixerConfig(**config, options={"lru_width": 9}))
    with pytest.raises(ValueError, match="conv_size is 0, expected at least 1"):
        build("griffin", MixerConfig(**config, options={"conv_size": 0}))
    with pytest.raises(ValueError, match="window is -1, expected at least 0"):
        build("local-attention", MixerConfig(**config, options={"window": -1}))
    with pytest.raises(ValueError, match="head width is 2, expected a positive multiple of"):
        build("local-attention", MixerConfig(**config, head_dim=2))
