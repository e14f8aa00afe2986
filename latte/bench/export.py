"""A Transformer of ours as a GGUF file, so that llama.cpp reads the same weights in the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from latte.extras import need
from latte.layers.quantized import Quantized
from latte.loading.packed import ENDS, LAYER
from latte.models import LatteForCausalLM


def write_gguf(model: LatteForCausalLM, path: Path) -> None:
    """Write a model of softmax attention (``transformer++``) as llama.cpp's architecture "llama".

    Matrices in blocks stay as they are, others are float32. The vocabulary is made up: tokens are numbers.
    """
    gguf = need("gguf", "a .gguf file")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(1 << 17)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads or config.num_attention_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", *(f"<{number}>" for number in range(3, config.vocab_size))])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges(["a b"])  # llama.cpp wants one at least
    writer.add_eos_token_id(0)
    names = {f"{name}.weight": target for name, target in ENDS.items()}
    if config.tie_word_embeddings:
        del names["output.weight"]
    for index in range(config.num_hidden_layers):
        for name, (target, _) in LAYER.items():
            names[f"blk.{index}.{name}.weight"] = f"model.layers.{index}.{target}"
    for name, target in names.items():
        module = model.get_submodule(target)
        weight = module.blocks if isinstance(module, Quantized) else module.get_parameter("weight")
        if target.endswith(("q_proj", "k_proj")):
            weight = _pairs_together(weight, config.hidden_size // config.num_attention_heads)
        kind = gguf.GGMLQuantizationType[module.kind if isinstance(module, Quantized) else "F32"]
        writer.add_tensor(name, np.ascontiguousarray(weight.detach().numpy()), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _pairs_together(rows: Tensor, head_width: int) -> Tensor:
    """Rows of queries or keys with the channels of a rotary pair beside each other, as llama.cpp turns them."""
    return rows.view(-1, 2, head_width // 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)
