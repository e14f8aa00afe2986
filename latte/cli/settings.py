"""Settings of a command: a recipe's file or packaged name, typed overrides, and help that explains every field."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from latte.cli.recipes import recipe_names, recipe_path, strings
from latte.cli.words import Words, setting_types, split
from latte.errors import UserError
from latte.files import without_surrogates
from latte.hub import require_findable

T = TypeVar("T")
#: How jsonargparse says that a setting does not exist, on the command line and in a file.
UNKNOWN = (
    r"unrecognized arguments: --([\w.]+)",
    r"Group '([\w.]+)' does not accept option '([\w.]+)'",
    r"Option '([\w.]+)' is not accepted",
)


def parse(
    command: str,
    description: str,
    kind: type[T],
    arguments: Sequence[str],
    positional: str | None = None,
    *,
    example: str | None = None,
    from_recipe: bool = True,
) -> T:
    """The settings of ``kind``, a dataclass, that the arguments and the recipe they name come to.

    Strings are literal, on the command line and in a recipe: ``null`` and ``# x`` are texts. A setting that may be
    nothing (``str | None``) is nothing when it is left out.

    Args:
        positional: a setting that is required, and may be given without its name at any place; ``model`` must be
            on this machine or on a hub that answers.
        example: a complete command, shown where something is missing; with it, a call without any argument is refused.
        from_recipe: whether the command takes --config and --print_config.

    Raises:
        UserError: an unknown, missing or ill-typed setting, or a recipe that does not exist.
    """
    kinds = setting_types(kind)
    parser = _parser(command, description, kind, example, from_recipe)
    words = split(arguments, kinds, positional is not None)
    if not {"-h", "--help"} & {*words.options}:
        _place(words, command, positional, f", for example: {example}" if example else "")
    options, literal = [], dict[str, Any]()
    for option in words.options:
        if option.startswith("--config=") and from_recipe:
            path = recipe_path(option.removeprefix("--config="))
            literal |= strings(path, kinds)
            option = f"--config={path}"
        options.append(option)
    literal |= words.strings
    try:
        settings = parser.parse_args([option for option in options if option != "--print_config"])
        for name, value in literal.items():
            settings[name] = value
        for name, hint in kinds.items():
            if settings[name] is None and type(None) not in get_args(hint):
                raise UserError(f"{name} is null, expected a value, or to be left out")
        values = vars(parser.instantiate(settings))
        recipe = kind(**{name: value for name, value in values.items() if name not in ("config", "json")})
    except ArgumentError as error:
        raise UserError(_sentence(str(error), parser)) from None
    if "--print_config" in options:
        from latte.recipe import to_yaml

        print(to_yaml(recipe), end="")
        raise SystemExit(0)
    if not (words.given - {"json"} or words.alone) and example is not None:
        raise UserError(f"nothing was given, expected a recipe or settings, for example: {example}")
    if positional is not None and not getattr(recipe, positional):
        raise UserError(f"{positional} is empty, expected a name")
    if positional == "model":
        require_findable(getattr(recipe, positional))
    return recipe


def _parser(command: str, description: str, kind: type, example: str | None, from_recipe: bool) -> ArgumentParser:
    set_parsing_settings(docstring_parse_attribute_docstrings=True, instantiate_subclass_spec_in_any=False)
    if example is not None:
        description = f"{description} Example: {example}"
    parser = ArgumentParser(prog=f"latte {command}", description=description, exit_on_error=False, allow_abbrev=False)
    if from_recipe:
        names = (
            ", ".join(recipe_names({name.partition(".")[0] for name in setting_types(kind)})) or "none fits this one"
        )
        parser.add_argument(
            "--config", action="config", help=f"a recipe: a YAML file, or the name of a packaged one ({names})"
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_class_arguments(kind, as_group=False)
    return parser


def _place(words: Words, command: str, positional: str | None, example: str) -> None:
    """Give the word without a name to the setting ``positional``, and refuse any other."""
    for word in words.alone:
        if positional is None or positional in words.given:
            raise UserError(f"{word!r} is not an option of latte {command}{example or ', expected --NAME VALUE'}")
        words.given.add(positional)
        words.strings[positional] = word
    if positional is not None and not words.given & {positional, "config", "print_config"}:
        raise UserError(f"no {positional} was given{example or f', expected latte {command} {positional.upper()}'}")


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


def text_or_file(text: str | None, file: str | None) -> str | None:
    """A text that was given itself or by the name of its file; a note on standard error counts undecodable bytes.

    Raises:
        UserError: the file can't be read.
    """
    from latte.cli.texts import note_undecodable

    if file is None:
        return text
    try:
        found, bad = without_surrogates(Path(file).read_text(encoding="utf-8", errors="surrogateescape"))
    except OSError as error:
        raise UserError(f"{file} can't be read: {error.strerror}") from error
    note_undecodable(file, bad)
    return found
