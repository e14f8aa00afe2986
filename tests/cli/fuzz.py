"""Mutations of valid command lines and recipes, the same ones every time, and what is known of each."""

from __future__ import annotations

import importlib
import random
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from latte.cli.main import COMMANDS
from latte.cli.words import is_text, setting_types
from latte.recipe import to_yaml

#: Settings that any whole number suits, and lists whose numbers may be 0.
ANY_NUMBER = ("split_seed",)
FROM_ZERO = ("shots",)
ODD_TEXT = [
    "",
    " ",
    "-",
    "--",
    "# x",
    "null",
    "~",
    "[",
    "{a: b}",
    "*a",
    "&a",
    "!!python/name:os.system",
    "é😀",
    "%",
    "\t",
]
ODD_TEXT += ["a" * 5000, "../..", "/dev/null", "'", '"', "@", "`", "-1", "1e999", ".nan", "=", "\ud800", "a\nb", "\\"]


@dataclass
class Case:
    """A command line, the text of the recipe that it names, and whether it must be refused."""

    command: str
    arguments: list[str]
    recipe: bytes | None = None
    wrong: bool = False
    about: str = ""


def kind_of(command: str) -> Any:
    """The dataclass of a command's settings."""
    return get_type_hints(importlib.import_module(f"latte.cli.{command}").run)["recipe"]


def example_of(command: str) -> list[str]:
    """A command's own example, without its name."""
    return shlex.split(getattr(importlib.import_module(f"latte.cli.{command}"), "EXAMPLE", ""))[2:]


def takes_recipe(command: str) -> bool:
    return command not in ("bench", "doctor", "report", "inspect")


def wrong_words(name: str, hint: Any) -> list[str]:
    """Words that are no value of a setting, whatever else is set."""
    negative = [] if name.rpartition(".")[2] in ANY_NUMBER else ["-1", "-999999999999999999999"]
    inner = {part for part in get_args(hint) if part is not type(None)}
    if hint is int or (inner == {int} and get_origin(hint) is not list):
        return ["many", "1.5", "[1]", "{a: 1}", ".nan", ".inf", "1 2", *negative]
    if hint is float or inner == {float}:
        return ["fast", "[1.0]", "{a: 1}", ".nan", ".inf", "-.inf", "1,5", *negative]
    if hint is bool:
        return ["maybe", "2", "[true]", "nul"]
    if get_origin(hint) is Literal:
        return ["zzz", "", "[a]", "0", get_args(hint)[0].upper()]
    if get_origin(hint) is list and get_args(hint)[0] is int:
        zero = [] if name in FROM_ZERO else ["0"]
        return ["x", "[1, x]", "[1", "{a: 1}", "1.5", *zero, "-1", "[4, -1]", "[[1]]"]
    if get_origin(hint) is dict:
        return ["3", "[1]", "x", "{a", "[a: b]"]
    return []


def wrong_values(name: str, hint: Any) -> list[Any]:
    """Values in a recipe that a setting does not take."""
    more: list[Any] = [] if is_text(hint) or type(None) in get_args(hint) else [None]
    if hint is int or hint is float:
        more += [True, {}, "x"]
    if is_text(hint):
        return [[1], {"a": 1}, ["a"]]
    return [*(yaml.safe_load(word) for word in wrong_words(name, hint) if _parses(word)), *more]


def cases(count: int, seed: int = 0) -> list[Case]:
    """So many cases of every kind, over all settings of all commands."""
    chance = random.Random(seed)
    every = [list(make(chance)) for make in (wrong_settings, wrong_recipes, unknown_settings)]
    systematic = [case for group in every for case in group]
    chance.shuffle(systematic)
    # Every setting is there before any has its second mutation.
    first, rest, seen = [], [], set()
    for case in systematic:
        (rest if (case.command, case.about) in seen else first).append(case)
        seen.add((case.command, case.about))
    mutated = mutations(chance)
    free = [next(mutated) for _ in range(max(count // 4, count - len(systematic)))]
    chosen = [*first, *rest][: count - len(free)]
    return [*chosen, *free]


def wrong_settings(chance: random.Random) -> Iterator[Case]:
    for command in COMMANDS:
        for name, hint in setting_types(kind_of(command)).items():
            for word in wrong_words(name, hint):
                given = [f"--{name}={word}"] if chance.random() < 0.5 or word.startswith("-") else [f"--{name}", word]
                yield Case(command, [*example_of(command), *given], wrong=True, about=name)


def wrong_recipes(chance: random.Random) -> Iterator[Case]:
    for command in filter(takes_recipe, COMMANDS):
        for name, hint in setting_types(kind_of(command)).items():
            for value in wrong_values(name, hint):
                *outer, last = name.split(".")
                contents: dict[str, Any] = {}
                place = contents
                for part in outer:
                    place = place.setdefault(part, {})
                place[last] = value
                text = yaml.safe_dump(contents).encode()
                # A setting of the example would replace the recipe's.
                given = [word for word in example_of(command) if not word.startswith("--config")]
                if f"--{name}" in given:
                    at = given.index(f"--{name}")
                    del given[at : at + 2]
                if "--config" in given:
                    at = given.index("--config")
                    del given[at : at + 2]
                yield Case(command, ["--config", "recipe.yaml", *given], text, wrong=True, about=f"recipe {name}")


def unknown_settings(chance: random.Random) -> Iterator[Case]:
    for command in COMMANDS:
        names = setting_types(kind_of(command))
        for name in names:
            at = chance.randrange(len(name))
            misspelt = name[:at] + name[at + 1 :] if chance.random() < 0.5 else name[:at] + "q" + name[at:]
            if misspelt and misspelt not in names:
                yield Case(command, [*example_of(command), f"--{misspelt}=1"], wrong=True, about=f"unknown {name}")


def mutations(chance: random.Random) -> Iterator[Case]:
    """Command lines and recipes with words or bytes changed at random: refused or not, but never with a traceback."""
    names = list(COMMANDS)
    while True:
        command = chance.choice(names)
        kind = kind_of(command)
        if takes_recipe(command) and chance.random() < 0.4:
            try:
                text = to_yaml(kind()).encode()
            except ValueError:  # it has settings that must be given
                text = b"out: made\nfile: doc.txt\n"
            yield Case(command, ["--config", "recipe.yaml", *example_of(command)], _changed_bytes(text, chance))
        else:
            words = [*example_of(command)]
            hints = setting_types(kind)
            for _ in range(chance.randrange(1, 4)):
                name = chance.choice(list(hints))
                words += [f"--{name}", chance.choice([*ODD_TEXT, *(wrong_words(name, hints[name]) or ["x"])])]
            yield Case(command, _changed_words(words, chance))


def _changed_words(words: list[str], chance: random.Random) -> list[str]:
    words = list(words)
    for _ in range(chance.randrange(3)):
        if not words:
            break
        at = chance.randrange(len(words))
        action = chance.randrange(5)
        if action == 0:
            del words[at]
        elif action == 1:
            words.insert(at, words[at])
        elif action == 2:
            words.insert(at, chance.choice(ODD_TEXT))
        elif action == 3:
            words[at] = words[at][: chance.randrange(len(words[at]) + 1)]
        else:
            other = chance.randrange(len(words))
            words[at], words[other] = words[other], words[at]
    # Help and --print_config are answers and not mistakes; other tests look at them.
    return [word for word in words if word.split("=")[0] not in ("-h", "--help", "--print_config", "--print-config")]


def _changed_bytes(text: bytes, chance: random.Random) -> bytes:
    changed = bytearray(text)
    for _ in range(chance.randrange(1, 5)):
        at = chance.randrange(len(changed) or 1)
        action = chance.randrange(5)
        if action == 0:
            del changed[at : at + chance.randrange(1, 20)]
        elif action == 1:
            changed[at:at] = chance.choice(ODD_TEXT).encode("utf-8", "replace")
        elif action == 2 and changed:
            changed[at % len(changed)] = chance.randrange(256)
        elif action == 3:
            lines = bytes(changed).split(b"\n")
            chance.shuffle(lines)
            changed = bytearray(b"\n".join(lines))
        else:
            del changed[at:]
    return bytes(changed)


def _parses(word: str) -> bool:
    try:
        yaml.safe_load(word)
    except yaml.YAMLError:
        return False
    return True


def write_files(case: Case, folder: Path) -> None:
    """What the commands' examples name, and the case's recipe."""
    (folder / "runs" / "mine").mkdir(parents=True)
    (folder / "runs" / "mine" / "config.json").write_text("{}")
    if case.recipe is not None:
        (folder / "recipe.yaml").write_bytes(case.recipe)
