"""The configuration of a model: its blocks, and which mixer each layer has."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from latte.mixers import MixerConfig, mixer_class
from latte.mixers.base import parse_options

BLOCKS = ("plain", "++")
POSITIONS = ("none", "learned")


class LatteConfig(PreTrainedConfig):
    """A stack of blocks, each a mixer and an MLP.

    Args:
        block: ``"plain"`` (LayerNorm, GELU MLP with biases) or ``"++"`` (RMSNorm, SwiGLU, no biases).
        mixer: name of the mixer of every layer; ``latte.mixers.names()`` lists them.
        mixer_options: options of that mixer.
        layer_mixers: one ``{"mixer": ..., "options": {...}}`` per layer where layers differ; overrides the two above.
        position_embedding: ``"none"`` or ``"learned"``, added to the embedding; mixers may encode position themselves.
        max_position_embeddings: size of the learned table, and the longest document a model with one can read.
        bidirectional: every token sees the whole document: for classifiers.
        two_towers: the classifier compares two documents.

    Raises:
        ValueError: an unknown block, mixer or option, or sizes that do not fit.
    """

    model_type = "latte"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (the base class declares it so)

    vocab_size: int = 32000
    hidden_size: int = 256
    intermediate_size: int = 1024
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    block: str = "++"
    mixer: str = "latte"
    mixer_options: dict[str, Any] | None = None
    layer_mixers: list[dict[str, Any]] | None = None
    position_embedding: str = "none"
    max_position_embeddings: int = 1024
    bidirectional: bool = False
    two_towers: bool = False
    dropout: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.mixer_options = dict(self.mixer_options or {})
        super().__post_init__(**kwargs)
        if self.block not in BLOCKS:
            raise ValueError(f"block is {self.block!r}, expected one of {', '.join(BLOCKS)}")
        if self.position_embedding not in POSITIONS:
            raise ValueError(
                f"position_embedding is {self.position_embedding!r}, expected one of {', '.join(POSITIONS)}"
            )
        if self.layer_mixers is not None and len(self.layer_mixers) != self.num_hidden_layers:
            layers = self.num_hidden_layers
            raise ValueError(f"layer_mixers has {len(self.layer_mixers)} entries, expected {layers}, one per layer")
        for layer in range(self.num_hidden_layers):
            name, mixer_config = self.mixer_config(layer)
            parse_options(name, mixer_class(name).Options, mixer_config.options)

    def mixer_config(self, layer: int) -> tuple[str, MixerConfig]:
        """Name and configuration of one layer's mixer."""
        name, options = self.mixer, self.mixer_options
        if self.layer_mixers is not None:
            entry = self.layer_mixers[layer]
            if "mixer" not in entry or set(entry) - {"mixer", "options"}:
                raise ValueError(
                    f"layer_mixers[{layer}] has the keys {sorted(entry)}, expected 'mixer' and perhaps 'options'"
                )
            name, options = entry["mixer"], entry.get("options", {})
        return name, MixerConfig(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            bidirectional=self.bidirectional,
            rope_theta=self.rope_theta,
            norm_eps=self.norm_eps,
            layer_index=layer,
            num_layers=self.num_hidden_layers,
            options=options or {},
        )
