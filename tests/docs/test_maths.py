"""docs/maths.md and the docstrings name each other, equation by equation."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import latte
from latte.models import LatteForCausalLM, preset
from latte.models.presets import published

PAGE = Path(__file__).parents[2] / "docs" / "maths.md"
ROW = re.compile(r"^\| \((\d+)\) \|.*\| `([\w.]+)` \|$", re.MULTILINE)
CITED = re.compile(r"[Ee]quations? \((\d+)\)(?: (to|and) \((\d+)\))?")
ROWS = [(int(number), name) for number, name in ROW.findall(PAGE.read_text())]


def resolve(name: str) -> object:
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[split:]:
            found = getattr(found, attribute)
        return found
    raise LookupError(name)


def cited(text: str | None) -> set[int]:
    """Equations that a docstring names: "equation (7)", "equations (1) to (3)", "equations (8) and (9)"."""
    numbers: set[int] = set()
    for first, joint, last in CITED.findall(text or ""):
        numbers |= set(range(int(first), int(last) + 1)) if joint == "to" else {int(n) for n in (first, last) if n}
    return numbers


def documented() -> list[tuple[str, object]]:
    """Every function and class of the package, under the module that defines it."""
    found = []
    for module_info in pkgutil.walk_packages(latte.__path__, "latte."):
        if (
            module_info.name.startswith(("latte.ops", "latte.layers", "latte.mixers"))
            and ".native" not in module_info.name
        ):
            module = importlib.import_module(module_info.name)
            for name, value in vars(module).items():
                if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__ == module.__name__:
                    found.append((f"{module.__name__}.{name}", value))
    return found


def test_every_equation_of_the_paper_has_a_row():
    assert {number for number, _ in ROWS} == set(range(1, 20))


@pytest.mark.parametrize(("number", "name"), ROWS)
def test_the_function_of_a_row_names_its_equation(number, name):
    function = resolve(name)
    text = inspect.getdoc(function) or ""
    for _, method in inspect.getmembers(function, inspect.isfunction):
        text += "\n" + (inspect.getdoc(method) or "")
    assert number in cited(text), f"{name} does not name equation ({number})"


def test_every_docstring_that_names_an_equation_has_a_row():
    rows = {(number, id(resolve(name))) for number, name in ROWS}
    for name, value in documented():
        for number in cited(inspect.getdoc(value)):
            assert (number, id(value)) in rows, f"{name} names equation ({number}), but docs/maths.md has no such row"


def test_the_parameter_table_is_what_the_presets_have():
    table = dict(re.findall(r"^\| ([\w+-]+) \| \d+M \| ([\d.]+)M \|", PAGE.read_text(), re.MULTILINE))
    assert set(table) == set(published())
    for variant, millions in table.items():
        with torch.device("meta"):
            model = LatteForCausalLM(preset(variant, "paper-150m"))
        positions = model.model.embed_positions
        count = model.num_parameters() - (0 if positions is None else positions.weight.numel())
        assert f"{count / 1e6:.1f}" == millions, variant
