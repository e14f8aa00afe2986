"""A layer: mix tokens, then work on each by itself, both on a residual stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from latte.mixers import build
from latte.mixers.layers import RMSNorm, nothing_but_forwards
from latte.models.config import LatteConfig
from latte.ops.pointwise import swiglu
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

    #: Tokens worked on at a time where no gradient is wanted: the wide activations of a long row stay in the cache.
    TOKENS_AT_ONCE = 512

    def __init__(self, config: LatteConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.down_proj.residual = True  # type: ignore[assignment]

    def forward(self, x_BTD: Tensor) -> Tensor:
        whole = torch.is_grad_enabled() or torch.compiler.is_compiling() or x_BTD.dim() < 3
        if whole or x_BTD.shape[1] <= self.TOKENS_AT_ONCE:
            return self._apply_to(x_BTD)
        return torch.cat([self._apply_to(part) for part in x_BTD.split(self.TOKENS_AT_ONCE, dim=1)], dim=1)

    def _apply_to(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.gate_proj(x_BTD), self.up_proj(x_BTD)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return self.down_proj(swiglu(gate, up))
        # The product of the two is not kept for gradients: computed again, it costs a pass over memory.
        return checkpoint(lambda: self.down_proj(swiglu(gate, up)), use_reentrant=False, preserve_rng_state=False)


def build_norm(config: LatteConfig) -> nn.Module:
    if config.block == "plain":
        return nn.LayerNorm(config.hidden_size, config.norm_eps)
    return RMSNorm(config.hidden_size, config.norm_eps)


class Block(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x))."""

    #: Tokens read at a time where no gradient is wanted, if the state says all of those before: what passes between
    #: the operations of a long row would otherwise be written to memory and read again, gigabytes of it.
    TOKENS_AT_ONCE = 2048

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
        if not self._in_pieces(x_BTD):
            return self._read(x_BTD, state, mask, reset)
        y_BTD = torch.empty_like(x_BTD)
        for start in range(0, x_BTD.shape[1], self.TOKENS_AT_ONCE):
            here = slice(start, start + self.TOKENS_AT_ONCE)
            flags = (None if flag is None else flag[:, here] for flag in (mask, reset))
            y_BTD[:, here], state = self._read(x_BTD[:, here], state, *flags)
        return y_BTD, state

    def _in_pieces(self, x_BTD: Tensor) -> bool:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or x_BTD.shape[1] <= self.TOKENS_AT_ONCE:
            return False
        return self.mixer.constant_state and not self.mixer.config.bidirectional

    def _read(
        self, x_BTD: Tensor, state: State | None, mask: Tensor | None, reset: Tensor | None
    ) -> tuple[Tensor, State | None]:
        mixed_BTD, after = self.mixer(self.mixer_norm(x_BTD), state=state, mask=mask, reset=reset)
        x_BTD = self._add(x_BTD, mixed_BTD, self.mixer)
        x_BTD = self._add(x_BTD, self.mlp(self.mlp_norm(x_BTD)), self.mlp)
        return x_BTD, after

    def _add(self, x_BTD: Tensor, change_BTD: Tensor, source: nn.Module) -> Tensor:
        change_BTD = self.dropout(change_BTD)
        if torch.compiler.is_compiling() or _global_forward_hooks or not nothing_but_forwards(source.modules()):
            return x_BTD + change_BTD  # a hook, of the last projection too, may have kept what it saw
        # Into memory that nobody else looks at: both end in a product, whose result no gradient asks for.
        return change_BTD.add_(x_BTD)
