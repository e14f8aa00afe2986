"""Projections and embeddings whose weights are blocks of few bits; activations are floats."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from latte.ops.blocks import FORMATS, block_linear, pack, unpack

#: What a user names, and the blocks it stands for. The head and the embedding, one matrix in most models, are kept at
#: 8 bits: they decide every token.
KINDS = {"int8": ("Q8_0", "Q8_0"), "int4": ("Q4_1", "Q8_0")}


class Quantized(nn.Module):
    """A matrix (rows, columns) in blocks."""

    blocks: Tensor

    def __init__(self, rows: int, columns: int, kind: str, blocks: Tensor | None = None) -> None:
        super().__init__()
        known = FORMATS[kind]
        if columns % known.numbers:
            raise ValueError(f"a matrix has {columns} columns, expected a multiple of {known.numbers} for {kind}")
        shape = (rows, known.row_bytes(columns))
        if blocks is None:
            blocks = torch.zeros(shape, dtype=torch.uint8)
        if blocks.shape != shape or blocks.dtype != torch.uint8:
            raise ValueError(
                f"blocks have shape {tuple(blocks.shape)} of {blocks.dtype}, expected {shape} of bytes for {kind}"
            )
        self.kind = kind
        self.register_buffer("blocks", blocks)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        # Bytes stay bytes whatever the model is cast to; they move with it.
        return super()._apply(lambda x: fn(x) if x.is_floating_point() else x.to(fn(x.new_empty(0).float()).device))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise ValueError(f"weights in blocks of {self.kind} can't be set, expected new blocks or a model in floats")
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        return self.kind


class QuantizedLinear(Quantized):
    """x times the transpose of a matrix in blocks."""

    bias: nn.Parameter | None

    def __init__(
        self, inputs: int, outputs: int, kind: str, blocks: Tensor | None = None, bias: nn.Parameter | None = None
    ) -> None:
        super().__init__(outputs, inputs, kind, blocks)
        self.in_features, self.out_features = inputs, outputs
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:
        """The matrix as floats, made anew at every call."""
        return unpack(self.blocks, self.kind, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return block_linear(x, self.blocks, self.kind, self.bias)


class QuantizedEmbedding(Quantized):
    """Rows of a matrix in blocks, times a scale."""

    def __init__(
        self, num_embeddings: int, width: int, kind: str, blocks: Tensor | None = None, scale: float = 1.0
    ) -> None:
        super().__init__(num_embeddings, width, kind, blocks)
        self.num_embeddings, self.embedding_dim, self.scale = num_embeddings, width, scale
        self.max_norm = None

    def forward(self, ids: Tensor) -> Tensor:
        # As nn.Embedding refuses ids that are no words.
        rows = F.embedding(ids.flatten(), self.blocks)
        return self.scale * unpack(rows.contiguous(), self.kind, self.embedding_dim).view(*ids.shape, -1)

    @property
    def weight(self) -> Tensor:
        """The matrix as floats, made anew at every call."""
        return unpack(self.blocks, self.kind, self.embedding_dim)


def quantized_linear(layer: nn.Linear, kind: str) -> QuantizedLinear:
    """A projection in blocks."""
    blocks = pack(layer.weight, kind)
    return QuantizedLinear(layer.in_features, layer.out_features, kind, blocks, layer.bias)
