"""The configuration of a model: which sublayers each layer has."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from latte.layers.mlp import MLPS
from latte.mixers import MixerConfig, mixer_class, names
from latte.mixers.options import option_names, parse_options

BLOCKS = ("plain", "++")
POSITIONS = ("none", "learned")
NORMS = ("rms", "layer")
#: The number of positions of a model that reads any length: a number, since tools cut texts to it (lm-eval takes a
#: missing one for 2,048).
NO_LIMIT = 1 << 30
#: The size of a learned table where none is given.
LEARNED_POSITIONS = 1024
#: What stands in a pattern for the mixer that ``mixer`` and ``mixer_options`` describe, and for the block's MLP.
MIXER, MLP = "mixer", "mlp"


class Sublayer(NamedTuple):
    """One residual sublayer: ``kind`` is mixer or mlp, ``name`` says which."""

    kind: str
    name: str
    config: MixerConfig


class LatteConfig(PreTrainedConfig):
    """A stack of layers, each a list of residual sublayers: mixers and MLPs.

    Args:
        block: ``"plain"`` (LayerNorm, GELU MLP with biases) or ``"++"`` (RMSNorm, SwiGLU, no biases).
        mixer: name of the mixer of every layer; ``latte.mixers.names()`` lists them.
        mixer_options: options of that mixer.
        pattern: the sublayers of one layer after another, repeated to the last layer, such as ``[["mixer", "mlp"]]``,
            the default. ``"mixer"`` is the mixer above and ``"mlp"`` the block's MLP; other mixers and MLPs
            (``"gelu"``, ``"swiglu"``, ``"geglu"``) stand there by name, mixers also as
            ``{"mixer": ..., "options": {...}}``.
        layer_mixers: one ``{"mixer": ..., "options": {...}}`` or name per layer where only mixers differ.
        norm: ``"rms"`` or ``"layer"``; the default is the block's.
        embedding_norm: a norm between the embedding and the first layer.
        position_embedding: ``"none"`` or ``"learned"``, added to the embedding; mixers may encode position themselves.
        max_position_embeddings: size of the learned table, and the longest document a model with one can read; always
            ``NO_LIMIT`` without one.
        return_logits: whether ``forward`` gives logits beside a loss; by default (None) in eval mode only.
        quantized: modules whose weights are blocks of few bits, and the blocks' format; ``model.quantize`` sets it.
        bidirectional: every token sees the whole document: for classifiers.
        two_towers: the classifier compares two documents.

    Options of the mixer may stand among these fields: they are put into ``mixer_options``.

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
    pattern: list[list[Any]] | None = None
    layer_mixers: list[Any] | None = None
    norm: str | None = None
    embedding_norm: bool = False
    position_embedding: str = "none"
    max_position_embeddings: int | None = None
    bidirectional: bool = False
    two_towers: bool = False
    dropout: float = 0.0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = True
    return_logits: bool | None = None
    quantized: dict[str, str] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.mixer_options = dict(self.mixer_options or {})
        self._take_options(kwargs)
        super().__post_init__(**kwargs)
        if self.num_key_value_heads is None:  # a number, as in transformers' own: tools multiply by it
            self.num_key_value_heads = self.num_attention_heads
        if self.position_embedding == "none":
            self.max_position_embeddings = NO_LIMIT
        elif self.max_position_embeddings is None:
            self.max_position_embeddings = LEARNED_POSITIONS
        choices = [("block", BLOCKS), ("position_embedding", POSITIONS), *([("norm", NORMS)] if self.norm else [])]
        for name, known in choices:
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}")
        if self.layer_mixers is not None and len(self.layer_mixers) != self.num_hidden_layers:
            layers = self.num_hidden_layers
            raise ValueError(f"layer_mixers has {len(self.layer_mixers)} entries, expected {layers}, one per layer")
        if self.layer_mixers is not None and self.pattern is not None:
            raise ValueError("both pattern and layer_mixers were given, expected one of them")
        for layer in range(self.num_hidden_layers):
            for sublayer in self.sublayers(layer):
                if sublayer.kind == MIXER:
                    parse_options(sublayer.name, mixer_class(sublayer.name).Options, sublayer.config.options)

    def _take_options(self, extra: dict[str, Any]) -> None:
        """Move options of the mixer from ``extra``, the keywords that are no fields, into ``mixer_options``.

        Raises:
            ValueError: an option that this model's mixer does not have, one given twice, or a misspelt name. Other
                keywords are transformers' to keep.
        """
        own = option_names(mixer_class(self.mixer).Options)
        assert self.mixer_options is not None
        for name in [name for name in extra if name in own]:
            if self.mixer_options.get(name, extra[name]) != extra[name]:
                raise ValueError(
                    f"{name} is {extra[name]!r}, but mixer_options has {self.mixer_options[name]!r}, expected one value"
                )
            self.mixer_options[name] = extra.pop(name)
        others = {option: other for other in names() for option in option_names(mixer_class(other).Options)}
        fields = [field.name for field in dataclasses.fields(self)]
        for name in extra:
            if name in others:
                raise ValueError(
                    f"{name!r} is an option of mixer {others[name]!r}, but the mixer is {self.mixer!r}, which has "
                    f"{', '.join(own) or 'none'}"
                )
            close = difflib.get_close_matches(name, [*fields, *own], n=1, cutoff=0.85)
            if close and not hasattr(PreTrainedConfig, name):
                raise ValueError(f"a configuration has no field {name!r} (did you mean {close[0]!r}?)")

    @property
    def norm_kind(self) -> str:
        return self.norm or ("layer" if self.block == "plain" else "rms")

    def sublayers(self, layer: int) -> list[Sublayer]:
        """The sublayers of one layer.

        Raises:
            ValueError: a pattern that is not a list of lists of sublayers.
        """
        if self.layer_mixers is not None:
            return [self._sublayer(layer, self.layer_mixers[layer], f"layer_mixers[{layer}]"), self._mlp(layer)]
        if self.pattern is None:
            return [self._own_mixer(layer), self._mlp(layer)]
        if not self.pattern or not all(isinstance(entry, list) and entry for entry in self.pattern):
            raise ValueError(f"pattern is {self.pattern!r}, expected a list of lists of sublayers")
        place = layer % len(self.pattern)
        return [self._sublayer(layer, entry, f"pattern[{place}]") for entry in self.pattern[place]]

    def mixer_names(self) -> list[str]:
        """The mixers of the model, each once, in the order of their first layer."""
        found = (
            sub.name for layer in range(self.num_hidden_layers) for sub in self.sublayers(layer) if sub.kind == MIXER
        )
        return list(dict.fromkeys(found))

    def _sublayer(self, layer: int, entry: Any, where: str) -> Sublayer:
        if entry == MLP:
            return self._mlp(layer)
        if entry == MIXER:
            return self._own_mixer(layer)
        if isinstance(entry, str) and entry in MLPS:
            return Sublayer(MLP, entry, self._layer_config(layer, {}))
        if isinstance(entry, str):
            return Sublayer(MIXER, mixer_class(entry).name, self._layer_config(layer, {}))
        if not isinstance(entry, dict) or "mixer" not in entry or set(entry) - {"mixer", "options"}:
            keys = sorted(entry) if isinstance(entry, dict) else entry
            raise ValueError(f"{where} has the keys {keys!r}, expected 'mixer' and perhaps 'options'")
        return Sublayer(MIXER, mixer_class(entry["mixer"]).name, self._layer_config(layer, entry.get("options") or {}))

    def _own_mixer(self, layer: int) -> Sublayer:
        return Sublayer(MIXER, mixer_class(self.mixer).name, self._layer_config(layer, self.mixer_options or {}))

    def _mlp(self, layer: int) -> Sublayer:
        return Sublayer(MLP, "gelu" if self.block == "plain" else "swiglu", self._layer_config(layer, {}))

    def _layer_config(self, layer: int, options: dict[str, Any]) -> MixerConfig:
        return MixerConfig(
            hidden_size=self.hidden_size,
            num_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            bidirectional=self.bidirectional,
            rope_theta=self.rope_theta,
            norm_eps=self.norm_eps,
            layer_index=layer,
            num_layers=self.num_hidden_layers,
            options=options,
        )
