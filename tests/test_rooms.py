"""The rooms of the package are ordered, and each imports only rooms above it.

Imports are read from the source by ast, those inside functions included: a lazy import is a dependency too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "latte"

#: From the top down; a room imports itself and rooms of earlier lines. Rooms of one line do not import each other,
#: except for the leaf modules of the first. A room that does not exist yet may be listed.
ORDER = [
    (
        "errors",
        "extras",
        "files",
        "hub",
        "memory",
        "modes",
        "shapes",
        "tokens",
        "state",
        "version",
        "_environment",
    ),  # leaf modules, open to every room
    ("ops",),  # functions of tensors
    ("layers",),  # parts that mixers share
    ("mixers",),  # mechanisms
    ("models",),  # language models and classifiers made of mixers
    ("testing",),  # the contract of a mixer, alone and in a model
    (
        "decode",
        "extend",
    ),  # two uses of a model, independent of each other: fast decoding, conversion of pretrained models
    ("generation",),  # many requests in one batch, guesses of a draft
    ("recipe",),  # settings as plain dataclasses: no model reads them, and everything below is called with them
    ("data",),  # text to packed rows of tokens, as a recipe says
    ("loading",),  # what is on disk or on the hub; needs data for tokenizers, and training starts from what it loads
    ("tasks",),  # what models are trained to do: data, model and metrics of each task
    ("train",),  # one training run
    ("eval",),  # measures a trained model; also while it trains, but through functions that are passed in
    ("doctor",),  # this machine: needs ops alone, but reports name the device
    ("report",),  # pages and tables of what train and eval measured
    ("workflows",),  # latte compare and latte extend: train, measure and report, in this order
    ("bench",),  # timings, with eval's clock for decoding
    ("recipes",),  # YAML files only
    ("cli",),  # commands: each calls one function of the rooms above
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}
#: What latte/__init__.py exports; it may not import more, since every module of the package runs it first.
EXPORTED = {*ORDER[0], "ops", "layers", "mixers", "models", "decode", "extend", "generation"}
#: Names of the package itself that any room may import.
PACKAGE_NAMES = {"__version__"}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


MODULES = sorted(PACKAGE.rglob("*.py"))
ROOMS = {room_of(path) for path in MODULES} - {"__init__"}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name, without the leading ``latte.``, of everything that a module imports from this package."""
    package = ["latte", *path.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == "latte" and rest not in PACKAGE_NAMES:
                yield node.lineno, rest


def violations(path: Path) -> list[str]:
    room = room_of(path)
    found = []
    for line, name in imports(path):
        other = name.partition(".")[0]
        if room == "__init__":
            allowed = other in EXPORTED
        else:
            allowed = other == room or RANK.get(other, len(ORDER)) < RANK[room] or RANK.get(other) == RANK[room] == 0
        if not allowed:
            found.append(f"{path.relative_to(PACKAGE.parent)}:{line} imports latte{'.' * bool(name)}{name}")
    return found


def test_every_room_has_a_place() -> None:
    assert not ROOMS - RANK.keys(), "add the new room to ORDER"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_room_imports_only_rooms_above_it(path: Path) -> None:
    assert violations(path) == []


@pytest.mark.parametrize("path", sorted((PACKAGE / "recipe").glob("*.py")), ids=lambda path: path.name)
def test_recipes_import_nothing_heavy(path: Path) -> None:
    assert {name.partition(".")[0] for _, name in imports(path)} <= {"recipe", "errors"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert {name.partition(".")[0] for name in names} <= {*sys.stdlib_module_names, "latte", "yaml"}


@pytest.mark.parametrize(
    ("room", "text", "forbidden"),
    [
        ("ops", "import latte.models", True),
        ("ops", "def f():\n    from latte.train import run", True),
        ("ops", "from latte import mixers", True),
        ("ops", "from ..mixers import base", True),
        ("ops", "import latte", True),
        ("ops", "if TYPE_CHECKING:\n    from latte.data import Batch", True),
        ("extend", "from latte.decode import session", True),
        ("decode", "from latte.extend import convert", True),
        ("report", "from latte.workflows import comparison", True),
        ("report", "from latte import __version__, doctor", False),
        ("ops", "from latte.errors import UserError", False),
        ("ops", "from . import scan", False),
        ("train", "from .checkpoint import save", False),
        ("cli", "import torch, latte.bench.run", False),
        ("models", "from latteria import milk", False),
    ],
)
def test_violations_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: str, text: str, forbidden: bool
) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "latte")
    path = tmp_path / "latte" / room / "module.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert bool(violations(path)) == forbidden


@pytest.mark.parametrize(
    "path", [path for path in MODULES if room_of(path) in ("layers", "mixers", "models", "extend")]
)
def test_no_kernel_is_called_past_its_op(path: Path) -> None:
    """Parts, mechanisms and models are plain code: kernels are behind ops, and in the decode engine."""
    kernels = [name for _, name in imports(path) if name.startswith("ops.native")]
    assert kernels == []
