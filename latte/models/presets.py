"""Named models at three sizes: the presets that mixers declare, among them the variants of the paper's Table 1."""

from __future__ import annotations

import dataclasses
from typing import Any

from latte.mixers import Mixer, Size, mixer_class, names
from latte.mixers.base import Preset
from latte.mixers.options import did_you_mean, option_names
from latte.models.config import LatteConfig

SIZES: dict[str, Size] = {
    "tiny": Size(128, 4, 4, 512, 4096, latents=64, window=32),
    "small": Size(384, 8, 8, 1536, 16384, latents=128, window=64),
    "paper-150m": Size(768, 12, 8, 3072, 50257, latents=128, window=128, dropout=0.1),
}


def variants() -> dict[str, tuple[type[Mixer], Preset]]:
    """Every preset with the mixer that declares it; a mixer that declares none has one of its own name."""
    found: dict[str, tuple[type[Mixer], Preset]] = {}
    for name in names():
        cls = mixer_class(name)
        for variant, fill in ({name: lambda size: {}} if cls.presets is None else cls.presets).items():
            if variant in found:
                raise ValueError(f"preset {variant!r} is declared by {found[variant][0].name!r} and by {name!r}")
            found[variant] = (cls, fill)
    return found


def published() -> dict[str, tuple[float, int]]:
    """Perplexity on OpenWebText and millions of parameters of presets, as the paper prints them."""
    return {variant: figures for name in names() for variant, figures in mixer_class(name).published.items()}


def preset(variant: str, size: str = "tiny", **overrides: Any) -> LatteConfig:
    """The configuration of a variant at a size; ``overrides`` are fields of LatteConfig or options of its mixer.

    Raises:
        ValueError: an unknown variant, size or override.
    """
    cls, fill = _known("variant", variant, variants())
    widths: Size = _known("size", size, SIZES)
    settings = {
        "mixer": cls.name,
        "bidirectional": "causal" not in cls.directions,
        **_fields_of(widths),
        **fill(widths),
    }
    options = dict(settings.pop("mixer_options", {}))
    fields, known_options = (
        config_fields(),
        option_names(mixer_class(overrides.get("mixer", settings["mixer"])).Options),
    )
    for name, value in overrides.items():
        if name in fields:
            settings[name] = value
        elif name in known_options:
            options[name] = value
        else:
            _known("override", name, sorted({*fields, *known_options}))
    return LatteConfig(**{**settings, "mixer_options": {**options, **(overrides.get("mixer_options") or {})}})


def example_layer(name: str, size: str = "small") -> Mixer:
    """One layer of the mixer ``name`` as its preset has it at ``size``; bidirectional only if it is nothing else."""
    cls, widths = mixer_class(name), _known("size", size, SIZES)
    built = next((variant for variant, (owner, _) in variants().items() if owner is cls), None)
    config = preset(built, size) if built is not None else LatteConfig(mixer=name, **_fields_of(widths))
    layer = next(sub.config for sub in config.sublayers(0) if sub.name == name)
    return cls(dataclasses.replace(layer, bidirectional="causal" not in cls.directions))


def shared_overrides(variant: str, size: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Those of ``overrides`` that concern a variant, where the same ones are given to several.

    An option that is off unless it is set (None) stays off where the variant does not use it: a window of another size
    is no reason to give one to a variant without.
    """
    cls, fill = _known("variant", variant, variants())
    own = {**fill(_known("size", size, SIZES)).get("mixer_options", {})}
    set_by_default = {name for name in option_names(cls.Options) if getattr(cls.Options, name, None) is not None}
    used = set_by_default | set(own)
    return {name: value for name, value in overrides.items() if name in config_fields() or name in used}


def config_fields() -> set[str]:
    """What may be set of a model's configuration."""
    return {field.name for field in dataclasses.fields(LatteConfig)} | {"num_labels"}


def _fields_of(size: Size) -> dict[str, Any]:
    return {name: value for name, value in size._asdict().items() if name not in ("latents", "window")}


def _known(what: str, name: str, known: Any) -> Any:
    if name in known:
        return known[name] if isinstance(known, dict) else name
    raise ValueError(f"unknown {what} {name!r}{did_you_mean(name, known)}, expected one of {', '.join(known)}")
