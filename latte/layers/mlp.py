"""MLPs: what works on each token by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latte.layers.config import MixerConfig
from latte.layers.linear import projected
from latte.ops.pointwise import swiglu
from latte.ops.recompute import recomputed


class PlainMLP(nn.Module):
    """down(gelu(up(x))), with biases."""

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.inner_width)
        self.down_proj = nn.Linear(config.inner_width, config.hidden_size)
        self.down_proj.residual = True  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return projected(self.down_proj, F.gelu(projected(self.up_proj, x)))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) . up(x)), without biases."""

    #: Tokens worked on at a time where no gradient is wanted: the wide activations of a long row stay in the cache.
    TOKENS_AT_ONCE = 512

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.inner_width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.inner_width, bias=False)
        self.down_proj = nn.Linear(config.inner_width, config.hidden_size, bias=False)
        self.down_proj.residual = True  # type: ignore[assignment]

    def forward(self, x_BTD: Tensor) -> Tensor:
        whole = torch.is_grad_enabled() or torch.compiler.is_compiling() or x_BTD.dim() < 3
        if whole or x_BTD.shape[1] <= self.TOKENS_AT_ONCE:
            return self._apply_to(x_BTD)
        return torch.cat([self._apply_to(part) for part in x_BTD.split(self.TOKENS_AT_ONCE, dim=1)], dim=1)

    def _apply_to(self, x_BTD: Tensor) -> Tensor:
        gate, up = projected(self.gate_proj, x_BTD), projected(self.up_proj, x_BTD)
        # The product of the two is not kept for gradients: computed again, it costs a pass over memory.
        return recomputed(lambda: projected(self.down_proj, swiglu(gate, up)))


class GeGLU(nn.Module):
    """down(gelu(gate(x)) . up(x)), with biases and gelu by tanh: Griffin's."""

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.inner_width)
        self.up_proj = nn.Linear(config.hidden_size, config.inner_width)
        self.down_proj = nn.Linear(config.inner_width, config.hidden_size)
        self.down_proj.residual = True  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        gate = F.gelu(projected(self.gate_proj, x), approximate="tanh")
        return projected(self.down_proj, gate * projected(self.up_proj, x))


#: MLPs by the name that a configuration uses.
MLPS: dict[str, type[nn.Module]] = {"gelu": PlainMLP, "swiglu": SwiGLU, "geglu": GeGLU}
