"""Files and folders that are written atomically and verified by checksums, and names on the hub."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from latte.errors import UserError

MANIFEST = "manifest.json"
SCRATCH = ".part-"  # prefix of files being written; a leftover of a killed process can be deleted

#: A repository on the Hugging Face hub: ``name`` or ``owner/name``.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
#: How ``surrogateescape`` represents a byte that is not text.
UNDECODABLE = re.compile("[\udc80-\udcff]")
RUNS = "runs/"  # where recipes put runs by default


class Damaged(ValueError):  # noqa: N818  (reads as what the folder is)
    """A folder that is not what was written: a file missing, added, cut or changed."""


def digest_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def without_surrogates(text: str) -> tuple[str, int]:
    """A text decoded with ``surrogateescape``, its undecodable bytes as U+FFFD, and how many there are."""
    return UNDECODABLE.subn("\ufffd", text)


def digest_json(value: Any) -> str:
    """SHA-256 of a value's canonical JSON."""
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


def may_be_on_hub(name: str) -> bool:
    """Whether a name can be a repository on the hub rather than a path on this machine that does not exist.

    ``owner/name`` is taken for a path if there is a folder ``owner``, or if it begins with ``runs/``.
    """
    if HUB_NAME.fullmatch(name) is None or Path(name).exists() or name.startswith(RUNS):
        return False
    return "/" not in name or not Path(name).parent.is_dir()


def require_file_place(path: Path) -> None:
    """Look whether a file can be written there, before the work whose result it will hold.

    Raises:
        UserError: a folder has its name, or a file the name of one of its folders.
    """
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not nearest.is_dir() or not os.access(nearest, os.W_OK):
        why = f"{nearest} is not a folder that can be written to"
        raise UserError(f"{path} can't be written: {'it is a folder' if path.is_dir() else why}")


def write_text(path: Path, text: str) -> None:
    """Replace a file's contents atomically; they are on disk when this returns."""
    scratch = path.with_name(f"{SCRATCH}{secrets.token_hex(4)}-{path.name}")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    _sync(path.parent)


@contextmanager
def whole_folder(path: Path, **about: Any) -> Iterator[Path]:
    """A scratch folder that is renamed to ``path`` on exit, with a manifest of checksums and synced to disk.

    If the body raises, the scratch folder is removed and an earlier folder at ``path`` is unchanged.

    Args:
        about: JSON values to record in the manifest.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{SCRATCH}{secrets.token_hex(4)}-{path.name}")
    scratch.mkdir()
    try:
        yield scratch
        _seal(scratch, about)
        _put(scratch, path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def verify_folder(path: Path) -> dict[str, Any]:
    """The manifest of a folder that :func:`whole_folder` made, after comparing every byte with it.

    Raises:
        Damaged: anything differs from what was written.
    """
    manifest = _read_manifest(path)
    present = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()} - {MANIFEST}
    for name in sorted(present - manifest["files"].keys()):
        raise Damaged(f"{path.name}/{name} is not in the manifest")
    return _compare(path, manifest, lambda name: True)


def verify_files(path: Path, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """The manifest of such a folder, after comparing only the ``wanted`` of its files; new files are no damage.

    Raises:
        Damaged: a wanted file is missing or differs from what was written, or the manifest is damaged.
    """
    return _compare(path, _read_manifest(path), wanted)


def remove_scratch(folder: Path) -> None:
    """Remove unfinished files of killed processes; only for a folder that no process is writing to."""
    for path in folder.glob(f"{SCRATCH}*"):
        remove(path)


def remove(path: Path) -> None:
    """Remove a file or folder; a folder is renamed first, so that it never exists in part under its own name."""
    if path.is_dir() and not path.name.startswith(SCRATCH):
        aside = path.with_name(f"{SCRATCH}{secrets.token_hex(4)}-{path.name}")
        path.rename(aside)
        path = aside
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
        checksum = manifest.pop("checksum")
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise Damaged(f"{path.name}/{MANIFEST} is missing or unreadable") from error
    # Compare the text and not only the parsed values, so that changed white space is noticed as well.
    if digest_json(manifest) != checksum or text != _canonical({**manifest, "checksum": checksum}):
        raise Damaged(f"{path.name}/{MANIFEST} does not have the checksum it states")
    return manifest


def _compare(path: Path, manifest: dict[str, Any], wanted: Callable[[str], bool]) -> dict[str, Any]:
    files = {name: entry for name, entry in manifest["files"].items() if wanted(name)}
    for name in files:
        if not (path / name).is_file():
            raise Damaged(f"{path.name}/{name} is missing")
    for name, entry in files.items():
        if (path / name).stat().st_size != entry["bytes"]:
            raise Damaged(f"{path.name}/{name} has {(path / name).stat().st_size} bytes, expected {entry['bytes']}")
        if digest_file(path / name) != entry["sha256"]:
            raise Damaged(f"{path.name}/{name} does not have the checksum of its manifest")
    return manifest


def _seal(folder: Path, about: dict[str, Any]) -> None:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    entries = {}
    for file in files:
        entries[file.relative_to(folder).as_posix()] = {"bytes": file.stat().st_size, "sha256": digest_file(file)}
        _sync(file)
    manifest: dict[str, Any] = {**about, "files": entries}
    manifest["checksum"] = digest_json(manifest)
    (folder / MANIFEST).write_text(_canonical(manifest), encoding="utf-8")
    _sync(folder / MANIFEST)
    for inner in [*(inner for inner in folder.rglob("*") if inner.is_dir()), folder]:
        _sync(inner)


def _put(scratch: Path, path: Path) -> None:
    old = None
    if path.exists():
        old = path.with_name(f"{SCRATCH}{secrets.token_hex(4)}-old-{path.name}")
        path.rename(old)
    try:
        scratch.rename(path)
    except BaseException:
        if old is not None:
            old.rename(path)
        raise
    _sync(path.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True)
