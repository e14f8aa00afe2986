"""A small random model of every family, with all its peculiarities switched on."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 8},
    "llama, scaled rotary, untied": {"model_type": "llama", "rope_parameters": LLAMA3, "tie_word_embeddings": False},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 12},
    "mistral, own window": {"model_type": "mistral", "sliding_window": 7},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 12},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 12,
        "sliding_window": 9,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 12,
        "sliding_window": 9,
        "query_pre_attn_scalar": 20,
        "final_logit_softcapping": 4.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1]},
    "smollm3, own window": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 6,
    },
    "olmo2": {"model_type": "olmo2"},
    "phi3": {"model_type": "phi3", "sliding_window": 7},
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.5,
    },
}


def small_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """The family's model with random weights, biases and norms too."""
    fields = {**SMALL, **FAMILIES[family], **overrides}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model
