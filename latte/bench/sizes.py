"""The models that are measured: one language model of each kind, of the same size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from latte.models import LatteConfig, LatteForCausalLM, preset

OURS, TRANSFORMER = "latte-r-swa++", "transformer++"


@dataclass(frozen=True)
class Size:
    """Widths of the models of a run; the MLP of the Transformer is wider, so that both have as many parameters."""

    width: int = 512
    layers: int = 8
    heads: int = 8
    latents: int = 256
    window: int = 128
    intermediate: int = 1344
    transformer_intermediate: int = 1536
    vocabulary: int = 8192

    def config(self, variant: str) -> LatteConfig:
        """The configuration of a variant at this size."""
        ours = variant == OURS
        return preset(
            variant,
            "small",
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=self.intermediate if ours else self.transformer_intermediate,
            vocab_size=self.vocabulary,
            **({"num_latents": self.latents, "window": self.window} if ours else {}),
        )

    def layer_config(self, variant: str) -> LatteConfig:
        """One layer alone, with the paper's MLP of four times the width."""
        wide = replace(self, layers=1, intermediate=4 * self.width, transformer_intermediate=4 * self.width)
        return wide.config(variant)

    def model(self, variant: str) -> LatteForCausalLM:
        torch.manual_seed(0)
        return LatteForCausalLM(self.config(variant))

    def mixing_flops(self) -> float:
        """Of a token in one layer beside the projections: latents, window, and the RG-LRU's gates."""
        per_head = self.width // self.heads
        return 4.0 * self.latents * per_head + 4.0 * (self.window + 1) * self.width + 4.0 * self.width * per_head


STANDARD = Size()  # 31 million parameters
TINY = Size(
    width=32, layers=2, heads=2, latents=8, window=8, intermediate=64, transformer_intermediate=72, vocabulary=64
)


def parameters(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())
