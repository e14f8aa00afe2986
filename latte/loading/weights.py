"""Where a folder keeps a model: the final one of a run, the newest whole checkpoint of an unfinished run, or itself."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latte.errors import UserError
from latte.files import MANIFEST, Damaged, verify_files, verify_folder
from latte.loading.layout import CHECKPOINTS, CONFIG, MODEL, RESULT, TOKENIZER

FOLDER = "the folder of a run, or one with config.json"
CHECKPOINT_KIND = "latte-checkpoint-1"
#: Files that loading reads; pages, plots and cards beside them may change.
READ = (".safetensors", ".json", ".jinja", ".model", ".txt")

Say = Callable[[str], None]


def to_stderr(message: str) -> None:
    print(message, file=sys.stderr)


@dataclass(frozen=True)
class Weights:
    """The folder of a model's weights and configuration, that of its tokenizer, and the step of a checkpoint."""

    folder: Path
    tokenizer: Path
    step: int | None = None  # None if the weights are final


def find_weights(name: str | Path, say: Say = to_stderr) -> Weights:
    """The model in a folder: a run's final one, else its newest whole checkpoint; any other folder is the model's own.

    Args:
        say: called with a sentence if a checkpoint stands in for the final model.

    Raises:
        UserError: there is no folder, or a run has no whole checkpoint yet.
    """
    path = Path(name)
    if not path.is_dir():
        raise UserError(f"there is no folder {path}: expected {FOLDER}")
    final = path / MODEL
    is_final = (final / "config.json").is_file()
    steps = checkpoint_steps(path)
    if is_final and not (steps and steps[-1] > _finished_steps(path)):
        return Weights(final, final)
    if steps:
        step = whole_checkpoint(path, say)
        if step is not None and not (is_final and step <= _finished_steps(path)):
            say(f"{path} is not finished: using its checkpoint at step {step}")
            return Weights(checkpoint_path(path, step), path / TOKENIZER, step)
        if is_final:
            return Weights(final, final)
        raise UserError(f"every checkpoint in {path / CHECKPOINTS} is damaged, and there is no final model")
    if (path / CONFIG).is_file() and not (path / "config.json").is_file():
        raise UserError(f"{path} has no checkpoint yet: its training has not come to the first one")
    if path.resolve().parent.name == CHECKPOINTS and (path.resolve().parents[1] / TOKENIZER).is_dir():
        return Weights(path, path.resolve().parents[1] / TOKENIZER)
    return Weights(path, path)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / CHECKPOINTS / f"step-{step:06d}"


def checkpoint_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in a run's folder, damaged ones included, oldest first."""
    names = [path.name.removeprefix("step-") for path in (folder / CHECKPOINTS).glob("step-*")]
    return sorted(int(name) for name in names if name.isdigit())


def whole_checkpoint(folder: Path, say: Say) -> int | None:
    """The step of the newest checkpoint that matches its checksums; None if there is none. Damaged ones are said."""
    for step in reversed(checkpoint_steps(folder)):
        try:
            manifest = verify_folder(checkpoint_path(folder, step))
            if manifest.get("kind") != CHECKPOINT_KIND or manifest.get("step") != step:
                raise Damaged(f"{checkpoint_path(folder, step).name} is not a checkpoint of that step")
            return step
        except Damaged as damage:
            say(f"the checkpoint at step {step} is damaged ({damage}) and is not used")
    return None


def require_whole(folder: Path) -> None:
    """Compare what loading reads from a folder that this project wrote with the folder's checksums.

    Folders of others have no manifest, or another one, and pass.

    Raises:
        UserError: a file is missing or changed.
    """
    if not _is_ours(folder):
        return
    try:
        verify_files(folder, lambda file: file.endswith(READ))
    except Damaged as damage:
        if folder.name == MODEL and (folder.parent / CONFIG).is_file():
            way = "the `latte train` that made it writes it again from its last checkpoint"
        else:
            way = "copy or make it again"
        raise UserError(
            f"the model in {folder} is damaged ({damage}): {way}; if it was changed on purpose, remove {MANIFEST}"
        ) from damage


def _is_ours(folder: Path) -> bool:
    try:
        manifest: Any = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True  # unreadable: verifying it says so
    return isinstance(manifest, dict) and {"files", "checksum"} <= manifest.keys()


def _finished_steps(folder: Path) -> float:
    """Steps of the final model of a run; infinite for a model without a result, which no checkpoint is newer than."""
    try:
        return int(json.loads((folder / RESULT).read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return float("inf")
