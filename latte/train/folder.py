"""A run's folder: locked while it is used, and compared with the recipe and the data that it was begun with."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from latte.errors import UserError
from latte.files import Damaged, remove_scratch, verify_folder, write_text
from latte.loading.layout import CONFIG, DATA, LOCK, MODEL, RESULT
from latte.recipe import flatten, from_yaml, require_same, to_yaml


@contextmanager
def run_folder(folder: Path, args: TrainingArguments, recipe: Any, data_digest: str) -> Iterator[None]:
    """Create or check a run's folder, and lock it against other processes.

    Raises:
        UserError: the folder belongs to another recipe or other data, or is in use, or is not a run's.
    """
    lock = from_first(args, lambda: _claim(folder, recipe, data_digest))
    try:
        yield
    finally:
        if lock is not None and args.process_index == 0:
            os.close(lock)


def _claim(folder: Path, recipe: Any, data_digest: str) -> int:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file, expected a folder for the run")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CONFIG).exists() and not (folder / LOCK).exists():
        raise UserError(f"{folder} holds other files and no run: give another --out")
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UserError(f"{folder} is in use by another process") from None
    try:
        remove_scratch(folder)
        if not (folder / CONFIG).exists():
            write_text(folder / DATA, json.dumps({"digest": data_digest}))
            write_text(folder / CONFIG, to_yaml(recipe))
        else:
            recorded = from_yaml(type(recipe), folder / CONFIG)
            require_same(flatten(recipe), flatten(recorded), str(folder))
            if json.loads((folder / DATA).read_text())["digest"] != data_digest:
                raise UserError(f"the text has changed since {folder} was begun: give another --out, or the same text")
            if recipe != recorded:  # in settings that may change: the file says what was asked for last
                write_text(folder / CONFIG, to_yaml(recipe))
    except BaseException:
        os.close(lock)
        raise
    return lock


def is_finished(folder: Path) -> bool:
    """Whether a run's final model and result are complete."""
    try:
        verify_folder(folder / MODEL)
    except Damaged:
        return False
    return (folder / RESULT).is_file()


def from_first(args: TrainingArguments, find: Callable[[], int | None]) -> int | None:
    """What ``find`` returns on the first process, on every process; its UserError is raised on every process too."""
    value = failure = None
    if args.process_index == 0:
        try:
            value = find()
        except UserError as error:
            failure = error
    if shared(int(failure is not None), args):
        raise failure or UserError("the first process could not use the run folder")
    return shared(value, args)


def shared(value: int | None, args: TrainingArguments) -> int | None:
    """Broadcast a number from the first process."""
    if args.world_size == 1:
        return value
    box = torch.tensor([-1 if value is None else value], device=args.device)
    torch.distributed.broadcast(box, src=0)
    return None if box.item() < 0 else int(box.item())
