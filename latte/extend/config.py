"""The configuration of an extended model: the pretrained model's own, and what its layers became."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from latte.extend.families import family_of
from latte.mixers import mixer_class
from latte.mixers.options import parse_options
from latte.models.config import NO_LIMIT

#: Fields of the pretrained configuration that transformers looks for on the outside.
SHARED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class LatteExtendedConfig(PreTrainedConfig):
    """A pretrained causal language model whose attention layers are Latte-Macchiato layers around their own weights.

    Args:
        original: the pretrained model's configuration, as a dictionary with its ``model_type``.
        options: options of the mixer ``latte``, the same for all layers; ``num_latents`` counts those of one head.
        full_layers: numbers of the layers that keep the pretrained attention instead.
        return_logits: whether ``forward`` gives logits beside a loss; by default (None) in eval mode only.
        quantized: modules whose weights are blocks of few bits, and the blocks' format; ``model.quantize`` sets it.
        max_position_embeddings: there is no limit, whatever the pretrained model had.

    Raises:
        UserError: a pretrained model that can't be extended.
        ValueError: unknown options, or layers that the model does not have.
    """

    model_type = "latte-extended"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (the base class declares it so)

    original: dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    full_layers: list[int] | None = None
    vocab_size: int = 0
    hidden_size: int = 0
    num_hidden_layers: int = 0
    num_attention_heads: int = 0
    tie_word_embeddings: bool = True
    use_cache: bool = True
    return_logits: bool | None = None
    quantized: dict[str, str] | None = None
    max_position_embeddings: int = NO_LIMIT
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.original is not None:
            inner = self.original_config()
            for name in SHARED:
                setattr(self, name, getattr(inner, name))
            for name in TOKENS:
                if getattr(self, name) is None:
                    setattr(self, name, getattr(inner, name, None))
            self.options = dict(self.options or {})
            parse_options("latte", mixer_class("latte").Options, self.options)
            for layer in self.full_layers or ():
                if layer not in range(self.num_hidden_layers):
                    raise ValueError(f"full_layers has {layer}, expected 0 to {self.num_hidden_layers - 1}")
        super().__post_init__(**kwargs)

    def original_config(self) -> Any:
        """The pretrained model's configuration as transformers' own class for it."""
        fields = dict(self.original or {})
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        family_of(config)
        return config
