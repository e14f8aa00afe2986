"""A layer: mix tokens, then work on each by itself, both on a residual stream."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from latte.mixers import build
from latte.mixers.layers import Linear, RMSNorm
from latte.models.config import LatteConfig
from latte.state import State


class PlainMLP(nn.Module):
    """down(gelu(up(x))), with biases."""

    def __init__(self, config: LatteConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.down_proj.residual = True  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) . up(x)), without biases."""

    def __init__(self, config: LatteConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, residual=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def build_norm(config: LatteConfig) -> nn.Module:
    if config.block == "plain":
        return nn.LayerNorm(config.hidden_size, config.norm_eps)
    return RMSNorm(config.hidden_size, config.norm_eps)


class Block(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: LatteConfig, layer: int) -> None:
        super().__init__()
        self.mixer_norm = build_norm(config)
        self.mixer = build(*config.mixer_config(layer))
        self.mlp_norm = build_norm(config)
        self.mlp = PlainMLP(config) if config.block == "plain" else SwiGLU(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, x_BTD: Tensor, state: State | None, mask: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, State | None]:
        mixed_BTD, after = self.mixer(self.mixer_norm(x_BTD), state=state, mask=mask, reset=reset)
        x_BTD = x_BTD + self.dropout(mixed_BTD)
        x_BTD = x_BTD + self.dropout(self.mlp(self.mlp_norm(x_BTD)))
        return x_BTD, after
