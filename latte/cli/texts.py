"""Texts that commands read and write: files of any length with a bar, and pieces of an answer as they come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from latte.errors import UserError

#: Control characters, which would move the cursor or change the settings of a terminal.
VISIBLE = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


@contextmanager
def open_text(name: str) -> Iterator[tuple[IO[bytes], int | None]]:
    """A file, or standard input for ``-``, and its size if that is known.

    Raises:
        UserError: there is no such file, or it can't be read.
    """
    if name == "-":
        yield sys.stdin.buffer, None
        return
    path = Path(name)
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}") from error
    with file:
        yield file, path.stat().st_size


def note_undecodable(name: str, count: int) -> None:
    """Say on standard error that a text has bytes which are not UTF-8, if it has some."""
    if count:
        bytes_are = "bytes are" if count > 1 else "byte is"
        where = "standard input" if name == "-" else name
        print(f"{count:,} {bytes_are} not UTF-8 in {where}, and read as U+FFFD", file=sys.stderr)


@contextmanager
def reading_bar(size: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal for texts of more than a moment; call what it gives with the number of bytes read."""
    console = Console(file=sys.stderr)
    if not console.is_terminal or (size is not None and size < 1 << 16):
        yield lambda count: None
        return
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=size)
        yield lambda count: progress.advance(task, count)


def show(piece: str) -> None:
    """Write a piece of a model's text to standard output at once; on a terminal without control characters."""
    sys.stdout.write(piece.translate(VISIBLE) if sys.stdout.isatty() else piece)
    sys.stdout.flush()
