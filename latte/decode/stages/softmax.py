"""Full softmax attention, with keys and values that grow."""

from __future__ import annotations

from typing import Any

from latte.decode.program import Builder
from latte.decode.stages.attention import ALL, Attention, queries_keys_values
from latte.decode.stages.registry import Out, stages_of
from latte.models.engine import Mixing


@stages_of("softmax")
def softmax(b: Builder, at: Mixing, x: str, out: Out) -> None:
    mixer: Any = at.mixer
    config = mixer.config
    width = config.num_heads * config.width
    queries_keys_values(b, at, x)
    attention = Attention(b, at, ALL, mixer.rotary)
    attention.keep()
    attention.attend(b.room("seen", width))
    b.product("seen", width, (at.values, "o_proj", config.hidden_size, out.y), added=out.added)
