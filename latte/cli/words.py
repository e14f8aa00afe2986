"""The words of a command line as named settings: strings stay as they were typed, switches and lists need no syntax."""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from latte.errors import UserError

YES, NO = ("true", "yes", "on"), ("false", "no", "off")
NUMBER = re.compile(r"[-+]?\d[\d_.,e+-]*")
#: Options that every command has besides its settings, and whether a value follows.
SHARED = {"help": False, "print_config": False, "json": False, "config": True}


@dataclass
class Words:
    """A command line: ``--name=value`` for the parser, strings that it must not interpret, and what stands alone."""

    options: list[str] = field(default_factory=list)
    strings: dict[str, str | list[str]] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    alone: list[str] = field(default_factory=list)


def setting_types(kind: Any, prefix: str = "") -> dict[str, Any]:
    """The type of every setting of a dataclass by its dotted name."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        found |= setting_types(hint, f"{prefix}{name}.") if is_dataclass(hint) else {f"{prefix}{name}": hint}
    return found


def is_text(hint: Any) -> bool:
    """Whether a setting is a string, or a string or nothing."""
    several = get_origin(hint) in (Union, types.UnionType)
    return hint is str or (several and set(get_args(hint)) == {str, type(None)})


def underscored(word: str) -> str:
    """``--save-state`` as ``--save_state``: both spellings of every option are understood."""
    name, equals, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if name.startswith("--") else word


def split(arguments: Sequence[str], kinds: dict[str, Any], takes_word: bool) -> Words:
    """Name every word of a command line.

    A string is the word after its option, whatever it contains. A switch alone is on. A list takes all words that
    follow, one word with commas, or YAML.

    Args:
        kinds: types of the settings by dotted name.
        takes_word: whether the command takes a word without a name; lists of strings then take one word only.

    Raises:
        UserError: an option without its value.
    """
    words, left = Words(), list(arguments)
    while left:
        word = left.pop(0)
        if word == "--":
            words.alone += left
            break
        if not word.startswith("--"):
            words.options.append(word) if word == "-h" else words.alone.append(word)
            continue
        name, equals, value = underscored(word)[2:].partition("=")
        words.given.add(name)
        hint = kinds.get(name)
        if SHARED.get(name) is False:
            words.options.append(f"--{name}")
            continue
        if hint is bool and not equals:
            value = left.pop(0).lower() if left and left[0].lower() in YES + NO else "true"
            words.options.append(f"--{name}={'true' if value in YES else 'false'}")
            continue
        values = [value] if equals else _values(name, hint, left, kinds, takes_word)
        if is_text(hint):
            words.strings[name] = values[0]
        elif get_origin(hint) is list and not values[0].lstrip().startswith("["):
            _add_list(words, name, get_args(hint)[0], values)
        else:
            words.options.append(f"--{name}={values[0]}")
    return words


def _values(name: str, hint: Any, left: list[str], kinds: dict[str, Any], takes_word: bool) -> list[str]:
    """The words after an option that are its value, taken from ``left``."""
    known = {f"--{other}" for other in [*kinds, *SHARED]}
    if not left or underscored(left[0]).partition("=")[0] in known or (not is_text(hint) and left[0].startswith("--")):
        raise UserError(f"--{name} needs a value" + (f": --{name}=VALUE takes any text" if is_text(hint) else ""))
    values = [left.pop(0)]
    if get_origin(hint) is list and not values[0].lstrip().startswith("["):
        numbers = get_args(hint)[0] is not str
        while left and not left[0].startswith("--") and (NUMBER.fullmatch(left[0]) if numbers else not takes_word):
            values.append(left.pop(0))
    return values


def _add_list(words: Words, name: str, element: Any, values: list[str]) -> None:
    items = [item.strip() for value in values for item in value.split(",") if item.strip()]
    if not items:
        raise UserError(f'--{name} needs a value, for example: --{name}=\'["a", "b"]\'')
    if element is str:
        words.strings[name] = items
    else:
        words.options.append(f"--{name}=[{', '.join(items)}]")
