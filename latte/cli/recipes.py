"""Recipes on disk and those that come with the package: paths, names, and the strings that a file holds."""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path
from typing import Any

from latte.cli.words import is_text
from latte.errors import UserError


def recipe_names(settings: set[str] | None = None) -> list[str]:
    """Recipes that come with the package; with ``settings``, those that set nothing else."""
    files = resources.files("latte.recipes").iterdir()
    names = sorted(Path(file.name).stem for file in files if file.name.endswith(".yaml"))
    return [name for name in names if settings is None or settings >= _contents(name).keys()]


def described() -> dict[str, str]:
    """The packaged recipes, each with the first sentence of its file."""
    found = {}
    for name in recipe_names():
        comment = []
        for line in _path(name).read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            comment.append(line.lstrip("# "))
        found[name] = " ".join(comment).partition(": ")[0].partition(". ")[0].rstrip(".") + "."
    return found


def recipe_path(name: str) -> Path:
    """The file of a recipe given by path or packaged name.

    Raises:
        UserError: there is neither.
    """
    if Path(name).is_file():
        return Path(name)
    if name in recipe_names():
        return _path(name)
    close = difflib.get_close_matches(name, recipe_names(), n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise UserError(f"there is no recipe {name!r}{hint}: give a YAML file, or one of {', '.join(recipe_names())}")


def strings(path: Path, kinds: dict[str, Any]) -> dict[str, str]:
    """The settings of a recipe that are strings, as they stand there; what is wrong with it is found by its parser."""
    import yaml

    try:
        contents = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    flat = _flat(contents, "")
    return {name: value for name, value in flat.items() if isinstance(value, str) and is_text(kinds.get(name))}


def _flat(contents: Any, prefix: str) -> dict[str, Any]:
    if not isinstance(contents, dict):
        return {prefix: contents}
    found: dict[str, Any] = {}
    for name, value in contents.items():
        found |= _flat(value, f"{prefix}.{name}" if prefix else str(name))
    return found


def _contents(name: str) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(_path(name).read_text(encoding="utf-8"))


def _path(name: str) -> Path:
    return Path(str(resources.files("latte.recipes") / f"{name}.yaml"))
