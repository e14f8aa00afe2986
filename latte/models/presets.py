"""Named models: the eight variants of the paper's Table 1 and 2, at the paper's size and at sizes for CPUs."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from latte.mixers import mixer_class
from latte.models.config import LatteConfig

#: What makes each variant: the block, the mixer and its options. ``window`` is filled in by the size.
VARIANTS: dict[str, dict[str, Any]] = {
    "latte": {"block": "plain", "mixer": "latte", "position_embedding": "learned"},
    "latte++": {"mixer": "latte", "position_embedding": "learned"},
    "latte-conv++": {"mixer": "latte", "options": {"feed": "conv"}},
    "latte-conv-swa++": {"mixer": "latte", "options": {"feed": "conv", "window": True}},
    "latte-r++": {"mixer": "latte", "options": {"feed": "rglru"}},
    "latte-r-swa++": {"mixer": "latte", "options": {"feed": "rglru", "window": True}},
    "r-swa++": {"mixer": "r-swa", "options": {"window": True}},
    "transformer++": {"mixer": "softmax"},
}

#: Widths of each size; ``latents`` and ``window`` go to the mixers that have them.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 4096,
        "latents": 64,
        "window": 32,
    },
    "small": {
        "hidden_size": 384,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "intermediate_size": 1536,
        "vocab_size": 16384,
        "latents": 128,
        "window": 64,
    },
    "paper-150m": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "intermediate_size": 3072,
        "vocab_size": 50257,
        "latents": 128,
        "window": 128,
        "dropout": 0.1,
    },
}

#: Perplexity on OpenWebText and millions of parameters, as the paper prints them.
PAPER_TABLE_1: dict[str, tuple[float, int]] = {
    "latte": (21.88, 111),
    "latte++": (21.56, 140),
    "latte-conv++": (20.26, 140),
    "latte-conv-swa++": (18.52, 153),
    "latte-r++": (19.99, 139),
    "latte-r-swa++": (17.64, 153),
    "r-swa++": (18.25, 141),
    "transformer++": (17.19, 151),
}


def preset(variant: str, size: str = "tiny", **overrides: Any) -> LatteConfig:
    """The configuration of a variant at a size; ``overrides`` are fields of LatteConfig or options of its mixer.

    Raises:
        ValueError: an unknown variant, size or override.
    """
    chosen = dict(_known("variant", variant, VARIANTS))
    widths = dict(_known("size", size, SIZES))
    options = dict(chosen.pop("options", {}))
    latents, window = widths.pop("latents"), widths.pop("window")
    if chosen["mixer"] == "latte":
        options["num_latents"] = latents
    if options.get("window") is True:
        options["window"] = window
    fields = {field.name for field in dataclasses.fields(LatteConfig)}
    known_options = {field.name for field in dataclasses.fields(mixer_class(chosen["mixer"]).Options)}
    settings = {"block": "++", **chosen, **widths}
    for name, value in overrides.items():
        if name in fields or name == "num_labels":
            settings[name] = value
        elif name in known_options:
            options[name] = value
        else:
            _known("override", name, sorted(fields | known_options))
    return LatteConfig(**{**settings, "mixer_options": {**options, **(overrides.get("mixer_options") or {})}})


def _known(what: str, name: str, known: Any) -> Any:
    if name in known:
        return known[name] if isinstance(known, dict) else name
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(f"unknown {what} {name!r}{hint}, expected one of {', '.join(known)}")
