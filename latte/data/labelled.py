"""Texts with labels from files: JSON lines, and the pairs of AAN as tab-separated values."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from latte.data.examples import Examples, ragged
from latte.errors import UserError
from latte.files import digest_file

#: Columns of AAN's files in the Long Range Arena.
AAN_COLUMNS = "label, id1, id2, text1, text2"


def labelled_texts(path: str, text_field: str, label_field: str, longest: int) -> Examples:
    """The texts of a file of JSON lines as bytes, at most ``longest`` of each, with their labels.

    Raises:
        UserError: the file can't be read, a line is not JSON or lacks a field, or a label is no whole number.
    """
    documents, labels = [], []
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where} is not JSON: {error}") from error
        if not isinstance(row, dict) or text_field not in row or label_field not in row:
            have = ", ".join(map(repr, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
            raise UserError(
                f"{where} has {have}, expected the fields {text_field!r} and {label_field!r}: set data.text_field and "
                "classify.label_field"
            )
        text = row[text_field]
        if not isinstance(text, str) or not text:
            raise UserError(f"{where}: the field {text_field!r} has no text")
        documents.append(_bytes(text, longest))
        labels.append(_label(row[label_field], where))
    return Examples(*ragged(documents), np.array(labels, np.int64))


def labelled_pairs(path: str, longest: int) -> Examples:
    """Pairs of texts in AAN's layout: label, two ids, two texts, separated by tabs.

    Raises:
        UserError: the file can't be read, or a line has other columns.
    """
    first, second, labels = [], [], []
    for number, line in _lines(path):
        columns, where = line.rstrip("\r\n").split("\t"), f"{path}, line {number}"
        if len(columns) != 5:
            raise UserError(f"{where} has {len(columns)} columns, expected 5 with tabs between them: {AAN_COLUMNS}")
        if not columns[3] or not columns[4]:
            raise UserError(f"{where} has an empty text, expected two texts")
        labels.append(_label(columns[0], where))
        first.append(_bytes(columns[3], longest))
        second.append(_bytes(columns[4], longest))
    return Examples(*ragged(first), np.array(labels, np.int64), *ragged(second))


def source_digest(path: str) -> str:
    """SHA-256 of a file.

    Raises:
        UserError: there is none.
    """
    if not Path(path).is_file():
        raise UserError(f"there is no file {path}")
    return digest_file(Path(path))


def _bytes(text: str, longest: int) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8", "replace")[:longest], np.uint8)


def _label(value: Any, where: str) -> int:
    try:
        number = float(value)  # AAN has 0.0 and 1.0
        if isinstance(value, bool) or not number.is_integer():
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UserError(f"{where} has the label {value!r}, expected a whole number") from None
    return int(number)


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Numbers and texts of the lines that are not empty."""
    file: IO[str]
    opened = gzip.open if path.endswith(".gz") else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error.reason}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} can't be read: {error}") from error
