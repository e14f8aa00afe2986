"""Lightning attention (Qin et al., 2024): linear attention whose heads forget at fixed paces."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latte.layers.config import MixerConfig
from latte.layers.linear import Linear, RMSNorm, split_heads
from latte.mixers.heads import HeadMixer
from latte.mixers.registry import register
from latte.ops import DecayState, decay_attention
from latte.state import State
from latte.tokens import Tokens


@register("lightning")
class LightningMixer(HeadMixer):
    """y_t = sum_s lambda_h^{t-s} (q_t . k_s) v_s, lambda_h = e^{-slope_h (1 - l/(L-1) + 1e-5)} in layer l of L.

    q, k and v are silu(x W); slope_h = 2^{-8h/H}, h = 1..H. The output is W_o (norm(y) . sigmoid(x W_1 W_2)), the norm
    over all heads together. Source: arXiv 2401.04658 with OpenNLPLab's slopes; flash-linear-attention has others, with
    a first head that never forgets. The norm has a scale, the source's has none. ``gate_rank`` 0 and ``output_norm``
    rms give the layer of MiniMax.
    """

    @dataclass(frozen=True)
    class Options:
        gate_rank: int | None = None  # of the output gate; None: head width; 0: one full matrix
        output_norm: Literal["layer", "rms"] = "layer"

    linear_in_values = True
    examples = ({}, {"gate_rank": 0, "output_norm": "rms", "layer_index": 1, "num_layers": 3})
    published = {"lightning": (23.67, 166)}  # noqa: RUF012

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        width, rank = config.num_heads * config.width, self.options.gate_rank
        rank = config.width if rank is None else rank
        if rank < 0:
            raise ValueError(f"mixer 'lightning': gate_rank is {rank}, expected at least 0")
        self.q_proj = Linear(config.hidden_size, width)
        self.k_proj = Linear(config.hidden_size, width)
        whole = Linear(config.hidden_size, width)
        self.gate_proj = nn.Sequential(Linear(config.hidden_size, rank), Linear(rank, width)) if rank else whole
        rms = self.options.output_norm == "rms"
        self.norm = RMSNorm(width, config.norm_eps) if rms else nn.LayerNorm(width, config.norm_eps, bias=False)

    def value_shape(self) -> tuple[int, int]:
        return self.config.num_heads, self.config.width

    def init_state(self, like_BTD: Tensor) -> DecayState:
        return DecayState.empty(like_BTD, self.config.num_heads, self.config.width, self.config.width)

    def values(self, x_BTD: Tensor) -> Tensor:
        return F.silu(super().values(x_BTD))

    def project(self, y_BTHV: Tensor, x_BTD: Tensor) -> Tensor:
        normed_BTD = self.norm(y_BTHV.flatten(2)).to(x_BTD.dtype)
        return self.o_proj(normed_BTD * torch.sigmoid(self.gate_proj(x_BTD)))

    def log_decay(self, like: Tensor) -> Tensor:
        """log lambda (H,)."""
        layer, layers = self.config.layer_index, self.config.num_layers
        # The small number below the fraction bar is for models of one layer; MiniMax has it too.
        left = 1 - layer / (layers - 1 + 1e-5) + 1e-5
        return -left * torch.tensor(slopes(self.config.num_heads), dtype=like.dtype, device=like.device)

    def mix_heads(self, x_BTD: Tensor, v_BTGV: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        q, k = (split_heads(F.silu(proj(x_BTD)), self.config.num_heads) for proj in (self.q_proj, self.k_proj))
        return decay_attention(q, k, v_BTGV, self.log_decay(q), state=state, tokens=tokens)


def slopes(heads: int) -> list[float]:
    """ALiBi's: 2^{-8h/H} for a power of two; else those of the power of two below, then every other one of the next."""
    power = 2 ** int(math.log2(heads))
    first = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    return first if power == heads else first + slopes(2 * power)[::2][: heads - power]
