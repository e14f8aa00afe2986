"""Bytes of a file to text: undecodable bytes are counted, and files that contain no text are refused."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

from latte.errors import UserError

#: Marks at the start of a file, of encodings that are not UTF-8; UTF-32 first, since its mark begins like UTF-16's.
MARKS = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
# Control characters that text does not contain: all but backspace, tab, line and page ends, and escape.
CONTROL = re.compile("[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f-\x84\x86-\x9f]")
NO_TEXT = 0.1  # of the bytes are undecodable or control characters
SAMPLE = 1 << 20  # bytes that decide whether a file contains text
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "\\": "\\"}


def unescape(text: str) -> str:
    r"""Replace ``\n``, ``\t``, ``\r``, ``\f`` and ``\\`` as typed in a shell; other backslashes stay."""
    return re.sub(r"\\([ntrf\\])", lambda found: ESCAPES[found.group(1)], text)


def decode(raw: bytes, encoding: str, path: Path) -> tuple[str, int]:
    """The text of a file, and the number of bytes that could not be decoded, which become U+FFFD.

    Raises:
        UserError: more than a tenth of its beginning is undecodable or control characters.
    """
    head, bad = _replace(raw[:SAMPLE], encoding)
    size = min(len(raw), SAMPLE)
    if bad + len(CONTROL.findall(head)) > NO_TEXT * size:
        mark = next((name for mark, name in MARKS.items() if raw.startswith(mark)), None)
        guess = f"its first bytes are the mark of {mark}" if mark else "if it is text in another encoding"
        raise UserError(
            f"{path} is not text in {encoding}: {bad:,} of its first {size:,} bytes can't be decoded and "
            f"{len(CONTROL.findall(head)):,} characters are control characters; {guess}, set data.encoding"
        )
    return (head, bad) if size == len(raw) else _replace(raw, encoding)


def note(counts: dict[Path, int], encoding: str) -> list[str]:
    """One sentence about undecodable bytes by file, if there are any."""
    bad = {path: count for path, count in counts.items() if count}
    if not bad:
        return []
    total, first = sum(bad.values()), min(bad)
    where = str(first) if len(bad) == 1 else f"{len(bad):,} files ({first} is the first)"
    other = "latin-1" if codecs.lookup(encoding).name == "utf-8" else "utf-8"
    return [
        f"{total:,} byte{'s are' if total > 1 else ' is'} not {encoding} in {where}, and read as U+FFFD: "
        f"set data.encoding, such as {other}, if the text has another"
    ]


class _Counting:
    """An error handler of codecs that replaces undecodable bytes and counts them."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def __call__(self, error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        self.num_bytes += error.end - error.start
        return "\ufffd", error.end


def _replace(raw: bytes, encoding: str) -> tuple[str, int]:
    counting = _Counting()
    codecs.register_error("latte.counting", counting)
    text = raw.decode(encoding, "latte.counting")
    # The mark that some editors put at the start of UTF-8 is no part of the text.
    return text.removeprefix("\ufeff"), counting.num_bytes
