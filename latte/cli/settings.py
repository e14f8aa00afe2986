"""Settings of a command: a recipe's file or packaged name, typed overrides, and help that explains every field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TypeVar, get_type_hints

from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from latte.errors import UserError

T = TypeVar("T")
#: How jsonargparse says that a setting does not exist, on the command line and in a file.
UNKNOWN = (
    r"unrecognized arguments: --([\w.]+)",
    r"Group '([\w.]+)' does not accept option '([\w.]+)'",
    r"Option '([\w.]+)' is not accepted",
)


def parse(command: str, description: str, kind: type[T], arguments: Sequence[str], positional: str | None = None) -> T:
    """The settings of ``kind``, a dataclass, that the arguments and the recipe they name come to.

    Args:
        positional: a field that may also be given without its name.

    Raises:
        UserError: an unknown or ill-typed setting, or a recipe that does not exist.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True, instantiate_subclass_spec_in_any=False)
    parser = ArgumentParser(prog=f"latte {command}", description=description, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="a recipe: a YAML file, or the name of a packaged one")
    parser.add_class_arguments(kind, as_group=False)
    arguments = _switched_on(_named(list(arguments), positional), kind)
    try:
        settings = parser.parse_args(_with_recipe(arguments))
        values = vars(parser.instantiate(settings))
        return kind(**{name: value for name, value in values.items() if name != "config"})
    except ArgumentError as error:
        raise UserError(_sentence(str(error), parser)) from None


def recipe_names() -> list[str]:
    """Recipes that come with the package."""
    files = resources.files("latte.recipes").iterdir()
    return sorted(Path(file.name).stem for file in files if file.name.endswith(".yaml"))


def recipe_path(name: str) -> Path:
    """The file of a recipe given by path or packaged name.

    Raises:
        UserError: there is neither.
    """
    if Path(name).is_file():
        return Path(name)
    if name in recipe_names():
        return Path(str(resources.files("latte.recipes") / f"{name}.yaml"))
    close = difflib.get_close_matches(name, recipe_names(), n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UserError(f"there is no recipe {name!r}{hint}: give a YAML file, or one of {', '.join(recipe_names())}")


def _with_recipe(arguments: list[str]) -> list[str]:
    resolved = []
    for index, argument in enumerate(arguments):
        if argument.startswith("--config="):
            argument = f"--config={recipe_path(argument.removeprefix('--config='))}"
        elif index > 0 and arguments[index - 1] == "--config":
            argument = str(recipe_path(argument))
        resolved.append(argument)
    return resolved


def _named(arguments: list[str], positional: str | None) -> list[str]:
    if positional is not None and arguments and not arguments[0].startswith("-"):
        return [f"--{positional}", *arguments]
    return arguments


def _switched_on(arguments: list[str], kind: type) -> list[str]:
    """A switch given by its name alone means that it is on."""
    switches = {f"--{name}" for name, hint in get_type_hints(kind).items() if hint is bool}
    following = [*arguments[1:], "--"]
    return [
        f"{argument}=true" if argument in switches and after.startswith("--") else argument
        for argument, after in zip(arguments, following, strict=True)
    ]


def _sentence(message: str, parser: ArgumentParser) -> str:
    """jsonargparse's account of a mistake as one sentence in the words of a recipe."""
    text = "; ".join(line.strip(" -") for line in message.splitlines() if line.strip())
    for pattern in UNKNOWN:
        found = re.search(pattern, text)
        if found:
            name = ".".join(found.groups())
            close = difflib.get_close_matches(name, [action.dest for action in parser._actions], n=1)
            return f"unknown setting {name}" + (f", did you mean {close[0]}?" if close else "")
    typed = re.search(r"Parser key \"([^\"]+)\":;? *Expected an? (.+)\. Got value: (.*)", text) or re.search(
        r"Parser key \"([^\"]+)\":;? *Does not validate .*Subtypes: \[(.*)\]; Errors.*Given value: (.*)", text
    )
    if typed:
        name, expected, value = typed.groups()
        expected = expected.replace("<class 'NoneType'>", "null").replace(", ", " or ")
        expected = re.sub(r"<class '(\w+)'>", r"\1", expected).replace("typing.Literal", "one of ")
        return f"{name} is {value!r}, expected {expected}"
    return text.replace('in "<unicode string>", ', "")
