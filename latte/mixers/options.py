"""Options of a mixer as its own dataclass, names and types checked."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal


def option_names(options_class: type) -> list[str]:
    """The options that a mixer has."""
    return (
        [field.name for field in dataclasses.fields(options_class)] if dataclasses.is_dataclass(options_class) else []
    )


def parse_options(mixer: str, options_class: type, given: Mapping[str, Any]) -> Any:
    """``given`` as the mixer's own dataclass of options, names and types checked."""
    if not dataclasses.is_dataclass(options_class):
        if given:
            raise ValueError(f"mixer {mixer!r} has no options, but {', '.join(map(repr, given))} was given")
        return options_class()
    hints = typing.get_type_hints(options_class)
    for name, value in given.items():
        if name not in hints:
            known = ", ".join(sorted(hints))
            raise ValueError(
                f"mixer {mixer!r} has no option {name!r}{did_you_mean(name, hints)}, expected one of {known}"
            )
        if not _fits(value, hints[name]):
            raise ValueError(f"mixer {mixer!r}: option {name} is {value!r}, expected {_describe(hints[name])}")
    return options_class(**given)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return value is None if hint is type(None) else isinstance(value, hint)


def _describe(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    return "None" if hint is type(None) else hint.__name__
