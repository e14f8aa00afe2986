"""Sources of text: each yields its documents in a fixed order, and has a digest of its contents."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from latte.data.decoding import decode, note, unescape
from latte.errors import UserError, reason
from latte.files import digest_file, digest_json
from latte.recipe import DataRecipe

TEXT_SUFFIXES = frozenset(
    (".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".csv", ".sql", ".sh", ".py", ".pyi", ".c", ".h")
)
JSON_SUFFIXES = frozenset((".jsonl", ".ndjson"))
# Not part of the standard library's source code: tests, bundled wheels, installed packages.
STDLIB_LEFT_OUT = frozenset(("test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled", "__pycache__"))


class Source(Protocol):
    """Documents that can be iterated over any number of times."""

    def documents(self) -> Iterator[str]: ...

    def digest(self) -> str:
        """Changes with any byte of the contents."""
        ...

    def notes(self) -> list[str]:
        """Sentences about the text that was iterated over: what could not be read as it is."""
        ...


def open_source(name: str, recipe: DataRecipe) -> Source:
    """The source called ``name``, with a recipe's settings.

    Raises:
        UserError: nothing there, or nothing in a known format.
    """
    source: Source
    if name == "python-stdlib":
        source = _stdlib()
    elif name.startswith("hf:"):
        source = HubSource(name.removeprefix("hf:"), recipe.hf_config, recipe.hf_split, recipe.text_field)
    else:
        source = _open_path(Path(name).expanduser(), recipe)
    return source if recipe.limit_bytes is None else Limited(source, recipe.limit_bytes)


@dataclass(frozen=True)
class FileSource:
    """Text, JSON lines and parquet files; the digest uses names relative to ``root``, so a folder may move."""

    root: Path
    files: tuple[Path, ...]
    formats: tuple[str, ...]
    text_field: str = "text"
    separator: str | None = None
    encoding: str = "utf-8"
    undecodable: dict[Path, int] = field(default_factory=dict, compare=False)  # bytes by file, counted while reading

    def documents(self) -> Iterator[str]:
        for path, kind in zip(self.files, self.formats, strict=True):
            if kind == "jsonl":
                yield from self._json_lines(path)
            elif kind == "parquet":
                yield from self._parquet(path)
            else:
                yield from self._text(path)

    def digest(self) -> str:
        entries = [(path.relative_to(self.root).as_posix(), digest_file(path)) for path in self.files]
        name = codecs.lookup(self.encoding).name
        another = [] if name == "utf-8" else [name]  # so that digests of UTF-8 are those of runs before this setting
        return digest_json([entries, self.formats, self.text_field, self.separator, *another])

    def notes(self) -> list[str]:
        return note(self.undecodable, self.encoding)

    def _text(self, path: Path) -> Iterator[str]:
        with _open(path) as file:
            try:
                raw = file.read()
            except (OSError, EOFError, zlib.error) as error:
                raise UserError(f"{path} can't be read: {error}") from error
        text, self.undecodable[path] = decode(raw, self.encoding, path)
        for document in text.split(self.separator) if self.separator else [text]:
            if document.strip():
                yield document

    def _json_lines(self, path: Path) -> Iterator[str]:
        number = 0
        encoding = "utf-8-sig" if codecs.lookup(self.encoding).name == "utf-8" else self.encoding
        with _open(path) as file, io.TextIOWrapper(file, encoding, newline="\n") as lines:
            try:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield from _text_of(_json(line, path, number), self.text_field, f"{path}, line {number}")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{path} is not {self.encoding} after line {number} ({error.reason}): set data.encoding if the "
                    f"text has another"
                ) from error
            except (OSError, EOFError, zlib.error) as error:
                raise UserError(f"{path} can't be read: {error}") from error

    def _parquet(self, path: Path) -> Iterator[str]:
        import pyarrow
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                if self.text_field not in file.schema_arrow.names:
                    raise UserError(_no_field(self.text_field, file.schema_arrow.names, str(path)))
                for batch in file.iter_batches(columns=[self.text_field]):
                    yield from (str(value) for value in batch.column(0).to_pylist() if value)
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{path} is not a readable parquet file: {error}") from error


@dataclass(frozen=True)
class HubSource:
    """A Hugging Face dataset, from the hub, its cache or a local folder."""

    name: str
    config: str | None
    split: str
    text_field: str

    def _rows(self) -> Any:
        import datasets

        try:
            rows = datasets.load_dataset(self.name, self.config, split=self.split)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise UserError(
                f"the dataset {self.name!r} (split {self.split!r}) can't be loaded: {reason(error)}"
            ) from error
        if self.text_field not in rows.column_names:
            raise UserError(_no_field(self.text_field, rows.column_names, f"the dataset {self.name!r}"))
        return rows

    def documents(self) -> Iterator[str]:
        for row in self._rows():
            if row[self.text_field]:
                yield str(row[self.text_field])

    def digest(self) -> str:
        # The fingerprint of datasets depends on paths and times of local files, so hash the text itself.
        total = hashlib.sha256()
        for text in self.documents():
            total.update(hashlib.sha256(text.encode("utf-8", "replace")).digest())
        return total.hexdigest()

    def notes(self) -> list[str]:
        return []


@dataclass(frozen=True)
class Limited:
    """The first ``limit`` bytes of another source."""

    source: Source
    limit: int

    def documents(self) -> Iterator[str]:
        left = self.limit
        for text in self.source.documents():
            raw = text.encode("utf-8", "replace")
            if len(raw) >= left:
                yield raw[:left].decode("utf-8", "ignore")
                return
            left -= len(raw)
            yield text

    def digest(self) -> str:
        return digest_json([self.source.digest(), self.limit])

    def notes(self) -> list[str]:
        return self.source.notes()


def _stdlib() -> FileSource:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in STDLIB_LEFT_OUT]  # do not walk site-packages, it may be huge
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    files = tuple(sorted(found, key=lambda path: path.relative_to(root).as_posix()))
    if not files:
        raise UserError(f"this Python keeps no source code of its standard library in {root}: set data.source")
    return FileSource(root, files, ("text",) * len(files))


def _open_path(path: Path, recipe: DataRecipe) -> FileSource:
    if path.is_file():
        files, root = [path], path.parent
    elif path.is_dir():
        root = path
        files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        if recipe.format == "auto":
            files = [file for file in files if _format(file) is not None]
        if not files:
            raise UserError(f"the folder {path} holds no text, JSON lines or parquet files")
    else:
        raise UserError(
            f"there is no file or folder {path}: data.source takes a path, python-stdlib, or hf:NAME for a dataset"
        )
    formats = [_format(file) if recipe.format == "auto" else recipe.format for file in files]
    for file, kind in zip(files, formats, strict=True):
        if kind is None:
            raise UserError(f"the format of {file} is unknown: set data.format to text, jsonl or parquet")
    separator = None if recipe.separator is None else unescape(recipe.separator)
    return FileSource(root, tuple(files), tuple(map(str, formats)), recipe.text_field, separator, recipe.encoding)


def _format(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    zipped = suffixes[-1:] == [".gz"]
    suffix = (suffixes[:-1] if zipped else suffixes)[-1:]
    if not suffix:
        return "text" if zipped else None  # enwik8.gz has no other suffix
    if suffix[0] in JSON_SUFFIXES:
        return "jsonl"
    if suffix[0] == ".parquet" and not zipped:
        return "parquet"
    return "text" if suffix[0] in TEXT_SUFFIXES else None


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _json(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}, line {number} is not JSON: {error}") from error


def _text_of(row: Any, field: str, where: str) -> Iterator[str]:
    """The text in a field of a JSON object; nothing if it is null or empty."""
    if not isinstance(row, dict):
        raise UserError(f"{where} holds a {type(row).__name__}, expected an object with the field {field!r}")
    if field not in row:
        raise UserError(_no_field(field, list(row), where))
    if row[field] is not None and not isinstance(row[field], str):
        raise UserError(f"{where}: the field {field!r} holds a {type(row[field]).__name__}, expected text")
    if row[field]:
        yield row[field]


def _no_field(field: str, fields: list[str], where: str) -> str:
    return f"{where} has no field {field!r}, only {', '.join(map(repr, fields))}: set data.text_field"
