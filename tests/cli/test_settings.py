"""Command lines: strings stay as typed, switches and lists need no syntax, and what is missing is said by example."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from latte.cli.main import COMMANDS, main
from latte.cli.settings import parse
from latte.cli.words import is_text, setting_types
from latte.errors import UserError
from latte.recipe import (
    CompareRecipe,
    EvalRecipe,
    ExtendRecipe,
    GenerateRecipe,
    InspectRecipe,
    Recipe,
    ReportRecipe,
    to_yaml,
)

ODD = ["# Read a file", "null", "~", "1e3", "[a", "yes", "{a: b}", '"quoted"', "", " x ", "-5", "--- a", "a: b", "é😀"]
KINDS = [CompareRecipe, EvalRecipe, ExtendRecipe, GenerateRecipe, InspectRecipe, Recipe, ReportRecipe]


@dataclass
class Inner:
    """Nested."""

    name: str = "x"
    """A name."""
    maybe: str | None = None
    """Perhaps a name."""
    on: bool = False
    """A switch."""


@dataclass
class Outer:
    """Settings of every type."""

    model: str = ""
    """A model."""
    maybe: str | None = None
    """Perhaps a text."""
    numbers: list[int] = field(default_factory=list)
    """Numbers."""
    texts: list[str] = field(default_factory=list)
    """Texts."""
    count: int | None = 5
    """A number or nothing."""
    inner: Inner = field(default_factory=Inner)
    """More."""


@pytest.fixture(autouse=True)
def somewhere(tmp_path, monkeypatch):
    """An empty folder but for what test command lines name as a model."""
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "a", "runs/mine"):
        (tmp_path / name).mkdir(parents=True)


def read(*arguments, **more) -> Outer:
    return parse("try", "A command.", Outer, arguments, **more)


def value(settings, name):
    for part in name.split("."):
        settings = getattr(settings, part)
    return settings


@pytest.mark.parametrize("text", ODD)
def test_strings_are_literal(text):
    for name in ("model", "maybe", "inner.name", "inner.maybe"):
        assert value(read(f"--{name}={text}"), name) == text
        assert value(read(f"--{name}", text), name) == text


@pytest.mark.parametrize("text", [text for text in ODD if text])
def test_strings_of_a_recipe_are_literal(text, tmp_path):
    quoted = json.dumps(text, ensure_ascii=False)
    (tmp_path / "a.yaml").write_text(f"maybe: {quoted}\ninner:\n  maybe: {quoted}\ncount: null\n")
    settings = read("--config", str(tmp_path / "a.yaml"))
    assert (settings.maybe, settings.inner.maybe, settings.count) == (text, text, None)
    assert read("--config", str(tmp_path / "a.yaml"), "--maybe", "other").maybe == "other"


@pytest.mark.parametrize("text", [text for text in ODD if text])
def test_a_written_recipe_gives_the_same_strings_again(text, tmp_path):
    (tmp_path / "a.yaml").write_text(to_yaml(Outer(model=text, maybe=text)))
    again = read("--config", str(tmp_path / "a.yaml"))
    assert (again.model, again.maybe) == (text, text)


@pytest.mark.parametrize("kind", KINDS)
def test_every_string_setting_of_every_command_is_literal(kind):
    names = [name for name, hint in setting_types(kind).items() if is_text(hint)]
    for name in names:
        assert "# null" in seen(kind, name, "# null")
    assert names


def seen(kind, name: str, text: str) -> str:
    """What a setting got, or the sentence that refuses it, which names what it got."""
    try:
        return value(parse("try", "A command.", kind, [f"--{name}", text]), name)
    except UserError as error:
        return str(error)


def test_a_string_without_its_value_is_refused():
    for name in ("--count", "--json"):
        with pytest.raises(UserError, match="--maybe needs a value: --maybe=VALUE takes any text"):
            read("--maybe", name, "3")
        assert read(f"--maybe={name}").maybe == name


def test_json_alone_is_no_setting(capsys):
    assert main(["train", "--json"]) == 2
    assert "nothing was given" in json.loads(capsys.readouterr().out)["error"]
    assert main(["generate", "folder", "--prompt", "--json", "x"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == "--prompt needs a value: --prompt=VALUE takes any text"


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["64"], [64]),
        (["64", "128"], [64, 128]),
        (["64,128"], [64, 128]),
        (["[64, 128]"], [64, 128]),
        (["[]"], []),
    ],
)
def test_lists_of_numbers_need_no_brackets(words, numbers):
    settings = read("--numbers", *words, "folder", positional="model")
    assert (settings.numbers, settings.model) == (numbers, "folder")
    assert read("--numbers", *words, "--count", "3").numbers == numbers


def test_lists_of_texts():
    assert read("--texts", "a", "~").texts == ["a", "~"]
    assert read("--texts", "a,b").texts == ["a", "b"]
    assert read("--texts", "[a, b]").texts == ["a", "b"]
    assert read("--texts", "a", "folder", positional="model").texts == ["a"]


@pytest.mark.parametrize("before", [[], ["--count", "3"], ["--inner.on"], ["--numbers", "1", "2"], ["--maybe", "a b"]])
def test_the_model_may_stand_anywhere(before):
    assert read(*before, "folder", positional="model").model == "folder"
    assert read("folder", *before, positional="model").model == "folder"


def test_switches_need_no_value():
    assert read("--inner.on").inner.on
    assert read("--inner.on", "--count", "3").inner.on
    assert not read("--inner.on", "false").inner.on
    assert not read("--inner.on=no").inner.on


def test_nothing_is_said_by_leaving_it_out():
    assert read("--count", "3").maybe is None
    assert read("--count", "null").count is None


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["a", "b"], "'b' is not an option of latte try"),
        (["a", "--model", "b"], "'a' is not an option of latte try"),
        (["a", "--numbers", "x"], "numbers is 'x', expected int"),
        (["a", "--count"], "--count needs a value"),
        (["a", "--count", "--inner.on"], "--count needs a value"),
        (["a", "--inner.on", "maybe"], "'maybe' is not an option"),
        (["a", "--cuont", "3"], "unknown setting cuont, did you mean count?"),
        (["--count", "3"], "no model was given, expected latte try MODEL"),
        ([], "no model was given"),
        (["--model="], "model is empty"),
    ],
)
def test_mistakes(arguments, sentence):
    with pytest.raises(UserError) as caught:
        read(*arguments, positional="model")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("bench", "doctor")])
def test_a_command_without_arguments_says_what_it_needs_with_an_example(name, capfd):
    assert main([name]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 1
    assert f"for example: latte {name} " in said.err or f"expected latte {name} " in said.err


def test_help_lists_the_packaged_recipes(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "demo-compare" in said
    assert "Latte-Macchiato beside a Transformer of the same size" in said
    for command, fits, other in (("train", "demo", "table1-small"), ("compare", "table1-small", "extend-smollm2")):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        said = " ".join(capsys.readouterr().out.split())
        assert fits in said.partition("a packaged one (")[2].partition(")")[0].split(", ")
        assert other not in said


def test_print_config_shows_strings_as_given(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "runs/mine", "--prompt", "# Read", "--print_config"])
    assert "prompt: '# Read'" in capsys.readouterr().out
