"""The layers of transformers that our mechanisms are measured beside: same widths, their plain torch code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from latte.bench.harness import Skipped
from latte.mixers import Mixer

#: A peer's module and the call of it, for a layer of ours.
Peer = tuple[nn.Module, Callable[[Tensor], Tensor]]


def mamba(ours: Mixer) -> Peer:
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    options = ours.options
    config = MambaConfig(
        hidden_size=ours.config.hidden_size,
        state_size=options.state_size,
        expand=options.expand,
        conv_kernel=options.conv_size,
    )
    module = MambaMixer(config, 0)
    return module, module


def mamba2(ours: Mixer) -> Peer:
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    options, width = ours.options, ours.config.width
    config = Mamba2Config(
        hidden_size=ours.config.hidden_size,
        num_heads=options.expand * ours.config.hidden_size // width,
        head_dim=width,
        state_size=options.state_size,
        n_groups=options.num_groups,
        expand=options.expand,
        conv_kernel=options.conv_size,
    )
    module = Mamba2Mixer(config, 0)
    return module, module


def rwkv4(ours: Mixer) -> Peer:
    from transformers import RwkvConfig
    from transformers.models.rwkv.modeling_rwkv import RwkvSelfAttention

    module = RwkvSelfAttention(RwkvConfig(hidden_size=ours.config.hidden_size, num_hidden_layers=1), 0)
    for name in ("time_decay", "time_first"):
        nn.init.normal_(getattr(module, name))
    return module, lambda x: module(x)[0]


def lightning(ours: Mixer) -> Peer:
    from transformers import MiniMaxConfig
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

    config = MiniMaxConfig(
        hidden_size=ours.config.hidden_size,
        num_attention_heads=ours.config.num_heads,
        head_dim=ours.config.width,
        num_hidden_layers=ours.config.num_layers,
        hidden_act="silu",
    )
    module = MiniMaxLightningAttention(config, 0)
    return module, lambda x: module(x, None, None)[0]


def gated_deltanet(ours: Mixer) -> Peer:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    config = Qwen3NextConfig(
        hidden_size=ours.config.hidden_size,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_value_heads=ours.config.num_heads,
        linear_num_key_heads=ours.config.num_heads,
        linear_key_head_dim=int(ours.options.key_fraction * ours.config.width),
        linear_value_head_dim=int(ours.options.value_fraction * ours.config.width),
        linear_conv_kernel_dim=ours.options.conv_size,
    )
    module = Qwen3NextGatedDeltaNet(config, 0)
    return module, lambda x: _first(module(x))


def kda(ours: Mixer) -> Peer:
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    config = KimiLinearConfig(
        hidden_size=ours.config.hidden_size,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_heads=ours.config.num_heads,
        linear_head_dim=ours.config.width,
        linear_conv_kernel_dim=ours.options.conv_size,
    )
    module = KimiLinearDeltaAttention(config, 0)
    return module, lambda x: _first(module(x))


def griffin(ours: Mixer) -> Peer:
    from transformers import RecurrentGemmaConfig
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

    width = ours.config.hidden_size
    config = RecurrentGemmaConfig(hidden_size=width, lru_width=width, num_attention_heads=ours.config.num_heads)
    module = RecurrentGemmaRecurrentBlock(config, 0)
    for weight in module.rg_lru.parameters():
        nn.init.normal_(weight, std=0.02)
    return module, lambda x: module(x, torch.arange(x.shape[1])[None], None, use_cache=False)[0]


def longformer(ours: Mixer) -> Peer:
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(
        hidden_size=ours.config.hidden_size,
        num_attention_heads=ours.config.num_heads,
        attention_window=[2 * ours.options.window],
        attention_probs_dropout_prob=0.0,
    )
    module = LongformerSelfAttention(config, 0)

    def call(x_BTD: Tensor) -> Tensor:
        if x_BTD.shape[1] % (2 * ours.options.window):
            raise Skipped(f"{x_BTD.shape[1]} tokens, expected a multiple of {2 * ours.options.window}")
        whole = torch.arange(x_BTD.shape[1]) < ours.options.global_tokens
        scores = whole[None].to(x_BTD.dtype) * 10_000.0  # above 0: a global token, 0: one of the window
        flags: dict[str, Any] = {"is_index_masked": scores < 0, "is_index_global_attn": scores > 0}
        return module(x_BTD, scores, is_global_attn=bool(whole.any()), **flags)[0]

    return module, call


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


#: By the name of the mechanism.
PEERS: dict[str, Callable[[Mixer], Peer]] = {
    "mamba": mamba,
    "mamba2": mamba2,
    "rwkv4": rwkv4,
    "lightning": lightning,
    "gated-deltanet": gated_deltanet,
    "kda": kda,
    "griffin": griffin,
    "longformer": longformer,
}
