"""RWKV-6 "Finch" (Peng et al., 2024): a matrix state per head that fades per channel, read before it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from latte.layers.config import MixerConfig
from latte.layers.linear import HeadNorm, Linear, LowRank, split_heads
from latte.layers.marks import Mark
from latte.mixers.base import Mixer, Preset, View
from latte.mixers.registry import register
from latte.mixers.rwkv4 import ramp, shift
from latte.ops import ConvState, DecayState, bonus_attention
from latte.ops.numbers import compute_dtype
from latte.shapes import require_divides
from latte.state import State, state
from latte.tokens import Tokens

#: What is projected from a blend of a token with the one before it, in the order of ``mix_up``.
BLENDS = ("w", "k", "v", "r", "g")


@state
class RWKV6State(State):
    shift: ConvState
    memory: DecayState


class CentredHeadNorm(HeadNorm):
    """Mean 0 and variance 1 for each head by itself."""

    def forward(self, y_BTHV: Tensor) -> Tensor:
        # The norm does not depend on the scale of y, but floats do: y is a product of three projections, whose square
        # overflows for large weights.
        largest = y_BTHV.detach().abs().amax(-1, keepdim=True).clamp(min=1.0)
        y_BTHV = y_BTHV / largest
        centred = y_BTHV - y_BTHV.mean(-1, keepdim=True)
        floor = (self.eps / largest / largest).clamp(min=1e-30)
        return centred * (centred.square().mean(-1, keepdim=True) + floor).rsqrt()


class ScaledHeadNorm(nn.Module):
    """Heads with mean 0 and variance 1, then a scale and a shift per channel.

    What is added to the variance is 64 times the eps of other norms: heads are sums over 64 channels.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.heads = CentredHeadNorm(64 * eps)
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, y_BTHV: Tensor) -> Tensor:
        normed = self.heads(y_BTHV).flatten(2)
        return normed * self.weight.to(normed.dtype) + self.bias.to(normed.dtype)


@register("rwkv6")
class RWKV6Mixer(Mixer):
    """y_t = r_t^T (S_{t-1} + diag(u) k_t v_t^T),  S_t = diag(w_t) S_{t-1} + k_t v_t^T,  o_t = W_o (norm(y_t) . g_t).

    g_t = SiLU(W_g x^g_t), w_t = e^{-e^{omega_t}}, omega_t = w_0 + W_2 tanh(W_1 x^w_t). x^w and what r, k, v and g are
    projected from are blends x_t + (x_{t-1} - x_t) . mu_t, with a mu_t of their own each, a constant plus a low-rank
    function of the tokens. Written as mu_t here, where RWKV-4 writes 1 - mu.
    """

    @dataclass(frozen=True)
    class Options:
        blend_rank: int = 32
        decay_rank: int = 64

    examples: ClassVar[tuple[Mapping[str, Any], ...]] = (
        {"blend_rank": 2, "decay_rank": 3},
        {"head_dim": 8},
    )
    presets: ClassVar[Mapping[str, Preset] | None] = {
        "rwkv6": lambda size: {
            "pattern": [["mixer", "rwkv4-channel"]],
            "norm": "layer",
            "norm_eps": 1e-5,
            "embedding_norm": True,
            "num_attention_heads": size.hidden_size // 64,
        }
    }
    marks: ClassVar[Mapping[str, Mark]] = {
        "time_decay": Mark(decay=False, float32=True),
        **dict.fromkeys(("bonus", "mu_x", "mix_up"), Mark(decay=False)),
    }

    def __init__(self, config: MixerConfig) -> None:
        super().__init__(config)
        D = config.hidden_size
        require_divides(f"mixer {self.name!r}", config.width, D, "head_dim", "hidden_size")
        self.num_heads = D // config.width
        for name in ("blend_rank", "decay_rank"):
            if getattr(self.options, name) < 1:
                raise ValueError(f"mixer {self.name!r}: {name} is {getattr(self.options, name)}, expected at least 1")
        rank = self.options.blend_rank
        self.mu_x = nn.Parameter(torch.empty(D))
        self.mu = nn.ParameterDict({name: torch.empty(D) for name in BLENDS})
        self.mix_down = Linear(D, len(BLENDS) * rank)
        self.mix_up = nn.Parameter(torch.empty(len(BLENDS), rank, D))
        self.time_decay, self.bonus = nn.Parameter(torch.empty(D)), nn.Parameter(torch.empty(D))
        self.decay_proj = LowRank(D, self.options.decay_rank, D, torch.tanh)
        self.r_proj, self.k_proj, self.v_proj, self.g_proj = (Linear(D, D) for _ in range(4))
        self.norm = ScaledHeadNorm(D, config.norm_eps)
        self.o_proj = Linear(D, D, residual=True)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        config, D = self.config, self.config.hidden_size
        depth = config.layer_index / max(config.num_layers - 1, 1)  # 0 in the first layer, 1 in the last
        keep, half = ramp(config, self.mu_x), ramp(config, self.mu_x, 0.5)
        init.copy_(self.mu_x, 1 - keep)
        for name, kept in zip(BLENDS, (keep, keep, keep + 0.3 * depth, half, half), strict=True):
            init.copy_(self.mu[name], 1 - kept)
        init.zeros_(self.mix_down.weight)
        init.uniform_(self.mix_up, -0.01, 0.01)
        init.zeros_(self.decay_proj.down.weight)
        init.uniform_(self.decay_proj.up.weight, -0.01, 0.01)
        channel_D = torch.arange(D, dtype=self.time_decay.dtype, device=self.time_decay.device)
        along = channel_D / max(D - 1, 1)
        init.copy_(self.time_decay, -6 + 5 * along ** (0.7 + 1.3 * depth))
        init.copy_(self.bonus, depth * (1 - along) + 0.1 * ((channel_D + 1) % 3 - 1))

    def init_state(self, like_BTD: Tensor) -> RWKV6State:
        width = self.config.width
        memory = DecayState.empty(like_BTD, self.num_heads, width, width)
        return RWKV6State(ConvState.empty(like_BTD, 2, self.config.hidden_size), memory)

    def blends(self, x_BTD: Tensor, before_BTD: Tensor) -> tuple[Tensor, ...]:
        """What the five projections see, in the order of BLENDS."""
        back_BTD = before_BTD - x_BTD
        low = torch.tanh(self.mix_down(x_BTD + back_BTD * self.mu_x)).unflatten(-1, (len(BLENDS), -1))
        mu = torch.stack([self.mu[name] for name in BLENDS])  # by name: the dictionary has an order of its own
        mu = mu + torch.einsum("btnr,nrd->btnd", low, self.mix_up).to(x_BTD.dtype)
        return (x_BTD[:, :, None] + back_BTD[:, :, None] * mu).unbind(2)

    def log_decay(self, blend_BTD: Tensor) -> Tensor:
        """-e^omega (B, T, D)."""
        wide = compute_dtype(blend_BTD)
        # Beyond 60 the decay is complete, and e^omega is still a number.
        return -(self.time_decay.to(wide) + self.decay_proj(blend_BTD).to(wide)).clamp(max=60.0).exp()

    def mix(self, x_BTD: Tensor, state: Any, tokens: Tokens) -> tuple[Tensor, State | None]:
        before_BTD, last = shift(x_BTD, state.shift, tokens)
        w, k, v, r, g = self.blends(x_BTD, before_BTD)
        wide = compute_dtype(x_BTD)
        r, k, v = (project(y).to(wide) for project, y in ((self.r_proj, r), (self.k_proj, k), (self.v_proj, v)))
        heads = [split_heads(y, self.num_heads) for y in (r, k, v, self.log_decay(w))]
        bonus_HK = self.bonus.to(wide).unflatten(0, (self.num_heads, -1))
        y_BTHV, memory = bonus_attention(*heads, bonus_HK, state=state.memory, tokens=tokens)
        normed = self.norm(y_BTHV).to(x_BTD.dtype)
        return tokens.zero_padding(self.o_proj(normed * F.silu(self.g_proj(g)))), RWKV6State(last, memory)

    def look(self, x_BTD: Tensor, tokens: Tokens | None = None) -> dict[str, View]:
        """``gates``: what a token leaves of each channel of the state, w."""
        before_BTD, _ = shift(x_BTD, ConvState.empty(x_BTD, 2, x_BTD.shape[2]), tokens or Tokens.of(x_BTD))
        gates = self.log_decay(self.blends(x_BTD, before_BTD)[0]).exp()
        return {"gates": View("channels", split_heads(gates, self.num_heads), False)}
