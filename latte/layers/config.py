"""What a part of a model needs to know of the layer it sits in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from latte.shapes import require_divides


@dataclasses.dataclass(frozen=True)
class MixerConfig:
    """The layer that a mixer sits in, and the options of its own mechanism.

    Raises:
        ValueError: a width or count that is not positive, or does not divide.
    """

    hidden_size: int
    num_heads: int
    num_key_value_heads: int | None = None  # shared by groups of heads; None: as many as heads
    head_dim: int | None = None  # value width per head; None: hidden_size / num_heads
    intermediate_size: int | None = None  # width inside the layer's MLP; None: four times hidden_size
    bidirectional: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    layer_index: int = 0
    num_layers: int = 1
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.head_dim is None:
            require_divides("mixer", self.num_heads, self.hidden_size, "num_heads", "hidden_size")
        require_divides("mixer", self.kv_heads, self.num_heads, "num_key_value_heads", "num_heads")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def inner_width(self) -> int:
        """Width inside an MLP."""
        return 4 * self.hidden_size if self.intermediate_size is None else self.intermediate_size

    @property
    def width(self) -> int:
        """Value width per head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim
