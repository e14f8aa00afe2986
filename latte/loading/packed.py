"""A GGUF file's model as it is: its blocks are the model's weights, nothing is unpacked to floats.

Llama's architecture without biases and with plain rotary encoding becomes a model of softmax attention of ours, which
the decode engine reads, or an extended model around the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from latte.errors import UserError
from latte.extend import LatteExtendedConfig, LatteExtendedForCausalLM
from latte.layers.quantized import QuantizedEmbedding, QuantizedLinear, quantized_linear
from latte.loading.gguf import FLOATS, GgufFile
from latte.models import LatteConfig, LatteForCausalLM
from latte.models.quantize import remember, replace_module
from latte.ops.blocks import FORMATS, unpack

#: Names in the file, and of the modules of a model of ours and of an extended one.
ENDS = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
LAYER = {
    "attn_norm": ("mixer_norm", "input_layernorm"),
    "attn_q": ("mixer.q_proj", "self_attn.mixer.window.attention.q_proj"),
    "attn_k": ("mixer.k_proj", "self_attn.mixer.window.attention.k_proj"),
    "attn_v": ("mixer.v_proj", "self_attn.mixer.window.attention.v_proj"),
    "attn_output": ("mixer.o_proj", "self_attn.mixer.window.attention.o_proj"),
    "ffn_norm": ("mlp_norm", "post_attention_layernorm"),
    "ffn_gate": ("mlp.gate_proj", "mlp.gate_proj"),
    "ffn_up": ("mlp.up_proj", "mlp.up_proj"),
    "ffn_down": ("mlp.down_proj", "mlp.down_proj"),
}
NEW_PROJECTIONS = (".latent_q_proj", ".latent_k_proj")
#: Metadata that a configuration is made of.
NEEDED = (
    "embedding_length",
    "feed_forward_length",
    "block_count",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)


def readable_as_is(file: GgufFile) -> bool:
    """Whether a file's model can be read without unpacking: Llama's architecture, no other tensors, blocks we know."""
    about = file.about
    if about.get("general.architecture") != "llama" or not all(_target(name) for name in file.tensors):
        return False
    if any(tensor.kind not in (*FLOATS, *FORMATS) for tensor in file.tensors.values()):
        return False
    if any(f"llama.{key}" not in about for key in NEEDED) or "token_embd.weight" not in file.tensors:
        return False
    width, heads = about["llama.embedding_length"], about["llama.attention.head_count"]
    return (about.get("llama.rope.dimension_count") or width // heads) * heads == width


def packed_model(file: GgufFile) -> LatteForCausalLM:
    """The file's model as one of softmax attention of ours, with the file's blocks as its weights.

    Raises:
        UserError: a matrix is missing or has another shape.
    """
    about = file.about
    config = LatteConfig(
        mixer="softmax",
        rope_theta=_theta(about),
        norm_eps=_norm_eps(about),
        **_shared_settings(file),
    )
    with torch.device("meta"):
        model = LatteForCausalLM(config)
    _fill(model, file, lambda name: _target(name))
    _require_all(model, file)
    return model.eval()


def _shared_settings(file: GgufFile) -> dict[str, Any]:
    """What our configuration and Llama's name alike."""
    about = file.about
    heads = about["llama.attention.head_count"]
    return {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": about["llama.embedding_length"],
        "intermediate_size": about["llama.feed_forward_length"],
        "num_hidden_layers": about["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": about.get("llama.attention.head_count_kv", heads),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_special_tokens(about),
    }


def extended_model(file: GgufFile, options: dict[str, Any]) -> LatteExtendedForCausalLM:
    """The file's model extended, its latents untrained: the pretrained weights stay in the file's blocks.

    Raises:
        UserError: as :func:`packed_model`.
        ValueError: unknown options.
    """
    about = file.about
    original = LlamaConfig(
        rope_parameters={"rope_type": "default", "rope_theta": _theta(about)},
        rms_norm_eps=_norm_eps(about),
        max_position_embeddings=about.get("llama.context_length", 2048),
        **_shared_settings(file),
    )
    with torch.device("meta"):
        model = LatteExtendedForCausalLM(LatteExtendedConfig(original=original.to_dict(), options=options))
    _fill(model, file, _extended_target)
    body = model.base.model
    body.rotary_emb = type(body.rotary_emb)(original)
    for name in model.new_parameters():
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, last, nn.Parameter(torch.empty_like(getattr(module, last), device="cpu")))
    for mixer in model.mixers:
        model.reset_new(mixer)
    _require_all(model, file)
    return model.eval()


def use_blocks(model: LatteExtendedForCausalLM, file: GgufFile) -> None:
    """Put the file's blocks in the place of an extended model's pretrained weights, where they are the same numbers."""

    def same(name: str) -> str | None:
        target = _extended_target(name)
        if target is None or file.tensors[name].kind in FLOATS:
            return None
        module: Any = model.get_submodule(target)
        values = _rows_in_our_order(model, target, file.load([name])[name])
        floats = unpack(values, file.tensors[name].kind, file.tensors[name].shape[-1])
        return target if torch.equal(floats, module.weight.detach().cpu().float()) else None

    _fill(model, file, same)


def quantize_new(model: LatteExtendedForCausalLM) -> None:
    """Turn the latents' projections, which extending added, into blocks of 8 bits: a token reads no large floats."""
    paths = dict(model.config.quantized or {})
    for path, module in list(model.named_modules()):
        if path.endswith(NEW_PROJECTIONS) and isinstance(module, nn.Linear) and module.in_features % 32 == 0:
            replace_module(model, path, quantized_linear(module, "Q8_0"))
            paths[path] = "Q8_0"
    remember(model, paths)


def _fill(model: Any, file: GgufFile, target_of: Callable[[str], str | None]) -> None:
    """Make the tensors of a file the weights of modules; head and embedding share theirs where they are tied."""
    paths: dict[str, str] = {}
    wanted = {name: target for name in file.tensors if (target := target_of(name)) is not None}
    for name, values in file.load(wanted).items():
        target, kind = wanted[name], file.tensors[name].kind
        try:
            _put(model, target, kind, _rows_in_our_order(model, target, values))
        except (AttributeError, ValueError, RuntimeError) as error:
            raise UserError(f"{file.path} has a tensor {name} that does not fit its model: {error}") from error
        if kind not in FLOATS:
            paths[target] = kind
    if model.config.tie_word_embeddings:
        _tie(model, paths)
    remember(model, paths)


def _put(model: Any, target: str, kind: str, values: Tensor) -> None:
    module: Any = model.get_submodule(target)
    if kind in FLOATS:
        if values.shape != module.weight.shape:
            raise ValueError(f"its shape is {tuple(values.shape)}, expected {tuple(module.weight.shape)}")
        module.weight = nn.Parameter(values.float(), requires_grad=False)
    elif isinstance(module, nn.Embedding):
        replace_module(model, target, QuantizedEmbedding(module.num_embeddings, module.embedding_dim, kind, values))
    else:
        replace_module(model, target, QuantizedLinear(module.in_features, module.out_features, kind, values))


def _tie(model: Any, paths: dict[str, str]) -> None:
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(table, QuantizedEmbedding):
        head.weight = table.weight
        return
    path = next(name for name, module in model.named_modules() if module is head)
    replace_module(model, path, QuantizedLinear(table.embedding_dim, table.num_embeddings, table.kind, table.blocks))
    paths[path] = table.kind


def _require_all(model: Any, file: GgufFile) -> None:
    missing = [name for name, weight in model.named_parameters() if weight.is_meta]
    if missing:
        raise UserError(f"{file.path} has no {missing[0]}, expected all weights of its model")


def _target(name: str, which: int = 0) -> str | None:
    """The module that a tensor of the file belongs to."""
    first, *rest = name.removesuffix(".weight").split(".")
    if not name.endswith(".weight"):
        return None
    if first != "blk":
        return ENDS.get(first) if not rest else None
    return f"model.layers.{rest[0]}.{LAYER[rest[1]][which]}" if len(rest) == 2 and rest[1] in LAYER else None


def _extended_target(name: str) -> str | None:
    target = _target(name, 1)
    return None if target is None else f"base.{target}"


def _rows_in_our_order(model: Any, target: str, rows: Tensor) -> Tensor:
    """Rows of queries and keys in the order of two halves: the file has the channels of a pair beside each other."""
    config = model.config if isinstance(model, LatteForCausalLM) else model.base.config
    turned = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    heads = turned.get(target.split(".")[-1])
    if heads is None:
        return rows
    order = torch.arange(len(rows)).view(heads, -1, 2).transpose(1, 2).flatten()
    return rows.copy_(rows[order])  # where they lay, in large pages


def _theta(about: dict[str, Any]) -> float:
    return float(about.get("llama.rope.freq_base", 10000.0))


def _norm_eps(about: dict[str, Any]) -> float:
    # In the file they are float32: 1e-5 comes back as 9.999999747378752e-06.
    return float(str(np.float32(about["llama.attention.layer_norm_rms_epsilon"])))


def _special_tokens(about: dict[str, Any]) -> dict[str, Any]:
    keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{name}_token_id": about.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
