"""A GGUF file's model as it is: its blocks are the model's weights, nothing is unpacked to floats.

Llama's architecture without biases and with plain rotary encoding becomes a model of softmax attention of ours, which
the decode engine reads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from latte.errors import UserError
from latte.layers.quantized import QuantizedEmbedding, QuantizedLinear
from latte.models import LatteConfig, LatteForCausalLM
from latte.models.quantize import remember, replace_module
from latte.ops.blocks import FORMATS

#: Names in the file, and in the model.
ENDS = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
LAYER = {
    "attn_norm": "mixer_norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_norm": "mlp_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FLOATS = ("F32", "F16")


def packed_config(about: dict[str, Any], tensors: dict[str, Any]) -> LatteConfig | None:
    """The configuration of a file's model, or None where it has to be unpacked: another architecture, tensors that are
    not in it, or blocks of another format."""
    if about.get("general.architecture") != "llama" or not all(_target(name) for name in tensors):
        return None
    if any(tensor.tensor_type.name not in (*FLOATS, *FORMATS) for tensor in tensors.values()):
        return None
    heads = about["llama.attention.head_count"]
    width = about["llama.embedding_length"]
    head_width = about.get("llama.rope.dimension_count") or width // heads
    if head_width * heads != width:
        return None
    return LatteConfig(
        mixer="softmax",
        vocab_size=int(tensors["token_embd.weight"].shape[1]),
        hidden_size=width,
        intermediate_size=about["llama.feed_forward_length"],
        num_hidden_layers=about["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=about.get("llama.attention.head_count_kv", heads),
        rope_theta=float(about.get("llama.rope.freq_base", 10000.0)),
        # In the file they are float32: 1e-5 comes back as 9.999999747378752e-06.
        norm_eps=float(str(np.float32(about["llama.attention.layer_norm_rms_epsilon"]))),
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=about.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=about.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=about.get("tokenizer.ggml.padding_token_id"),
    )


def packed_model(config: LatteConfig, tensors: dict[str, Any], path: object) -> LatteForCausalLM:
    """The model with the file's blocks as its weights.

    Raises:
        UserError: a matrix is missing or has another shape.
    """
    with torch.device("meta"):
        model = LatteForCausalLM(config)
    paths: dict[str, str] = {}
    for name, tensor in tensors.items():
        target, kind = _target(name), tensor.tensor_type.name
        assert target is not None
        try:
            _fill(model, target, kind, torch.from_numpy(np.array(tensor.data)))
        except (AttributeError, ValueError, RuntimeError) as error:
            raise UserError(f"{path} has a tensor {name} that does not fit its model: {error}") from error
        if kind not in FLOATS:
            paths[target] = kind
    if config.tie_word_embeddings:
        _tie(model, paths)
    missing = [name for name, weight in model.named_parameters() if weight.is_meta]
    if missing:
        raise UserError(f"{path} has no {missing[0]}, expected all weights of its model")
    remember(model, paths)
    return model.eval()


def _fill(model: LatteForCausalLM, target: str, kind: str, values: Tensor) -> None:
    """Make a tensor of the file the weight of a module."""
    module: Any = model.get_submodule(target)
    config = model.config
    turned = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    heads = turned.get(target.split(".")[-1])
    if heads is not None:
        values = _unturned(values, heads)
    if kind in FLOATS:
        if values.shape != module.weight.shape:
            raise ValueError(f"its shape is {tuple(values.shape)}, expected {tuple(module.weight.shape)}")
        module.weight = nn.Parameter(values.float(), requires_grad=False)
    elif isinstance(module, nn.Embedding):
        replace_module(model, target, QuantizedEmbedding(module.num_embeddings, module.embedding_dim, kind, values))
    else:
        replace_module(model, target, QuantizedLinear(module.in_features, module.out_features, kind, values))


def _tie(model: LatteForCausalLM, paths: dict[str, str]) -> None:
    table: Any = model.get_input_embeddings()
    if isinstance(table, QuantizedEmbedding):
        head = QuantizedLinear(table.embedding_dim, table.num_embeddings, table.kind, table.blocks)
        replace_module(model, "lm_head", head)
        paths["lm_head"] = table.kind
    else:
        model.lm_head.weight = table.weight


def _target(name: str) -> str | None:
    """The module that a tensor of the file belongs to."""
    first, *rest = name.removesuffix(".weight").split(".")
    if not name.endswith(".weight"):
        return None
    if first != "blk":
        return ENDS.get(first) if not rest else None
    return f"model.layers.{rest[0]}.{LAYER[rest[1]]}" if len(rest) == 2 and rest[1] in LAYER else None


def _unturned(rows: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in the order of two halves: the file has the channels of a pair beside each other."""
    return rows.view(heads, -1, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)
