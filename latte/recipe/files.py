"""Recipes as YAML files, and whether two recipes describe the same run."""

from __future__ import annotations

from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from latte.errors import UserError

R = TypeVar("R")

#: Settings that may change when a run is resumed: they do not change its result. Where text lies is one of them: what
#: it says is compared by its digest.
FREE = frozenset(
    {
        "out",
        "data.cache",
        "data.source",
        "data.valid_source",
        "classify.test_source",
        "train.micro_batch_size",
        "train.strategy",
        "train.log_every",
        "train.eval_every",
    }
    | {"train.sample_every", "train.sample_prompt", "train.sample_tokens"}
    | {"train.eval_rows", "train.save_every", "train.keep_checkpoints", "train.gradient_checkpointing"}
)
#: Settings that may be a path; a name that is not on disk stays a name.
PATHS = frozenset({"source", "valid_source", "test_source", "tokenizer", "pretrained", "sources", "scores", "model"})
RESERVED = ("python-stdlib", "bpe", "bytes", "smollm2-135m", "")
#: What is measured after training may change as well, and is then measured again.
FREE_GROUPS = ("judge.",)
#: A run may be made longer: it goes on from its last state.
STEPS = "train.steps"


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """A recipe as dotted names and plain values; dictionaries such as overrides are values."""
    if not is_dataclass(value):
        return {prefix: value}
    result: dict[str, Any] = {}
    for entry in fields(value):
        result |= flatten(getattr(value, entry.name), f"{prefix}.{entry.name}" if prefix else entry.name)
    return result


def require_same(mine: dict[str, Any], recorded: dict[str, Any], where: str) -> None:
    """Compare a recipe with the recorded one of a run's folder.

    Raises:
        UserError: they differ in a setting that changes the result.
    """
    differ = [name for name in sorted(mine.keys() | recorded.keys()) if mine.get(name) != recorded.get(name)]
    differ = [name for name in differ if name not in FREE and not name.startswith(FREE_GROUPS)]
    if STEPS in differ and None not in (mine.get(STEPS), recorded.get(STEPS)):
        if mine[STEPS] < recorded[STEPS] and differ == [STEPS]:
            raise UserError(f"{where} was begun with {STEPS} {recorded[STEPS]}, now {mine[STEPS]}: it may only grow")
        if mine[STEPS] > recorded[STEPS]:
            differ.remove(STEPS)
    if differ:
        said = "; ".join(f"{name} was {recorded.get(name)!r}, now {mine.get(name)!r}" for name in differ[:3])
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise UserError(f"{where} belongs to another run ({said}{more}): give another --out, or the same settings")


def anchored(recipe: R) -> R:
    """The recipe with the paths in it made absolute, so that a run is found from any folder."""
    changes: dict[str, Any] = {}
    for entry in fields(recipe):  # type: ignore[arg-type]
        value = getattr(recipe, entry.name)
        if is_dataclass(value):
            changes[entry.name] = anchored(value)
        elif entry.name in PATHS and isinstance(value, str):
            changes[entry.name] = _absolute(value)
        elif entry.name in PATHS and isinstance(value, list):
            changes[entry.name] = [_absolute(item) for item in value]
    return replace(recipe, **changes)  # type: ignore[type-var]


def _absolute(value: str) -> str:
    path = Path(value).expanduser()
    return value if value in RESERVED or not path.exists() else str(path.absolute())


def to_yaml(recipe: Any) -> str:
    """The recipe as YAML that a command takes as its --config."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes strings that look like numbers: 1e3 is a string in YAML 1.1 and a number to other readers."""

    def quoted(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        style = "'" if text[:1] in tuple("+-.0123456789") else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, quoted)
    return yaml.dump(asdict(recipe), Dumper=Dumper, sort_keys=False, allow_unicode=True)


def from_yaml(kind: type[R], path: Path) -> R:
    """Read what :func:`to_yaml` wrote.

    Raises:
        UserError: there is no such file, or it is not such a recipe.
    """
    import yaml

    try:
        return _build(kind, yaml.safe_load(path.read_text(encoding="utf-8")) or {}, "")
    except OSError as error:
        raise UserError(f"there is no {path}") from error
    except (yaml.YAMLError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a recipe: {str(error).splitlines()[0]}") from error


def from_values(kind: type[R], values: dict[str, Any]) -> R:
    """A recipe of plain values, groups as dictionaries.

    Raises:
        UserError: an unknown setting, or a value that can't be used.
    """
    return _build(kind, values, "")


def _build(kind: type[R], values: dict[str, Any], prefix: str) -> R:
    hints = get_type_hints(kind)
    arguments = {}
    for name, value in values.items():
        if name not in hints:
            raise UserError(f"unknown setting {prefix}{name}, expected one of {', '.join(hints)}")
        if is_dataclass(hints[name]) and isinstance(value, dict):
            value = _build(hints[name], value, f"{prefix}{name}.")
        elif is_dataclass(hints[name]) and not isinstance(value, hints[name]):
            raise UserError(f"{prefix}{name} is {value!r}, expected its settings by name")
        arguments[name] = value
    return kind(**arguments)
