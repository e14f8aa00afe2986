"""Mixers by name. Every module of this package is imported once, so that a mechanism is registered by being there."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import TypeVar

from latte.layers.config import MixerConfig
from latte.mixers.base import Mixer
from latte.mixers.options import did_you_mean

M = TypeVar("M", bound=type[Mixer])
_REGISTRY: dict[str, type[Mixer]] = {}


def register(name: str) -> Callable[[M], M]:
    """Class decorator that makes a mixer known by ``name``.

    Raises:
        ValueError: another mixer has that name.
    """

    def add(cls: M) -> M:
        known = _REGISTRY.get(name)
        if known is not None and known.__qualname__ != cls.__qualname__:
            raise ValueError(f"mixer {name!r} is registered already, by {known.__module__}.{known.__qualname__}")
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return add


def discover(package: str, path: list[str]) -> None:
    """Import every module of a package, which registers the mixers in it."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


def names() -> list[str]:
    """Names of all registered mixers."""
    return sorted(_REGISTRY)


def mixer_class(name: str) -> type[Mixer]:
    """The class registered as ``name``.

    Raises:
        ValueError: no mixer has that name.
    """
    if name not in _REGISTRY:
        raise ValueError(f"unknown mixer {name!r}{did_you_mean(name, names())}, expected one of {', '.join(names())}")
    return _REGISTRY[name]


def build(name: str, config: MixerConfig) -> Mixer:
    """A new mixer of that name.

    Raises:
        ValueError: an unknown name or option, or sizes that do not fit.
    """
    return mixer_class(name)(config)
