"""GGUF files: metadata, and where each tensor lies. Only the header is parsed; a file of any size is open in a moment.

The gguf package reads the same in seconds: it makes an array of every string of the vocabulary.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latte.errors import UserError
from latte.ops.blocks import FORMATS

MAGIC = b"GGUF"
VERSIONS = (2, 3)
#: Scalars of metadata by their number: how struct reads them. 8 is a string and 9 a list.
SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
STRING, LIST = 8, 9
#: Formats of tensors by their number in the file.
KINDS = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
} | {
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}
FLOATS = {"F32": 4, "F16": 2}


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file: its format, its shape as torch counts it (columns last), and its first byte in the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int | None:
        """Bytes of a row; None in formats that are not read as they are."""
        if self.kind in FLOATS:
            return FLOATS[self.kind] * self.shape[-1]
        return FORMATS[self.kind].row_bytes(self.shape[-1]) if self.kind in FORMATS else None


@dataclass(frozen=True)
class GgufFile:
    """A file's metadata and tensors by name."""

    path: Path
    about: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def load(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors whose format is read as it is, in one piece of memory: floats, or blocks (rows, bytes)."""
        known = {name: self.tensors[name] for name in names}
        if not known:
            return {}
        first = min(tensor.start for tensor in known.values())
        last = max(tensor.start + _bytes(tensor) for tensor in known.values())
        memory = large_pages(last - first)
        with self.path.open("rb") as file:
            file.seek(first)
            file.readinto(memory.numpy())  # type: ignore[arg-type]
        loaded = {}
        for name, tensor in known.items():
            raw = memory[tensor.start - first :][: _bytes(tensor)]
            dtype = {"F32": torch.float32, "F16": torch.float16}.get(tensor.kind)
            loaded[name] = raw.view(*tensor.shape[:-1], -1) if dtype is None else raw.view(dtype).view(tensor.shape)
        return loaded


def large_pages(size: int) -> Tensor:
    """Bytes that lie in large pages where the system has them: reading all of them once looks up few addresses."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has small pages
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8))[:size]


def read_gguf(path: Path) -> GgufFile:
    """Parse a file's header.

    Raises:
        UserError: it is cut off, no GGUF file, of another version, or has tensors of an unknown format.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            about, infos, start = _header(_Cursor(data))
    except (struct.error, MemoryError, OverflowError, ValueError) as error:  # also of an empty file
        raise UserError(f"{path} is not a whole GGUF file: {error}") from error
    tensors = {}
    for name, shape, kind, offset in infos:
        if kind not in KINDS:
            raise UserError(
                f"{path} has a tensor {name} in format {kind}, which is not known: expected a format of GGUF"
            )
        tensor = tensors[name] = GgufTensor(name, KINDS[kind], shape, start + offset)
        if tensor.kind in FORMATS and shape[-1] % FORMATS[tensor.kind].numbers:
            raise UserError(
                f"{path} has a tensor {name} with {shape[-1]} columns, expected whole blocks of "
                f"{FORMATS[tensor.kind].numbers} for {tensor.kind}"
            )
        if tensor.start + _bytes(tensor) > size:
            raise UserError(f"{path} is not a whole GGUF file: {name} ends behind its last byte")
    return GgufFile(path, about, tensors)


def _bytes(tensor: GgufTensor) -> int:
    return (tensor.row_bytes or 0) * math.prod(tensor.shape[:-1])


class _Cursor:
    """Reads one value after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def numbers(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def string(self) -> str:
        (length,) = self.numbers("Q")
        if length > len(self.data) - self.at:
            raise ValueError("a text ends behind its last byte")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def strings(self, count: int) -> list[str]:
        """As :meth:`string` so many times, without its calls: a vocabulary has a hundred thousand."""
        data, at, size, length_at = self.data, self.at, len(self.data), struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            start = at + 8
            at = start + length_at(data, at)[0]
            if at > size:
                raise ValueError("a text ends behind its last byte")
            texts.append(data[start:at].decode("utf-8"))
        self.at = at
        return texts

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == LIST:
            inner, count = self.numbers("IQ")
            if count > len(self.data):
                raise ValueError(f"a list of {count} values is longer than the file")
            if inner in SCALARS:
                return list(self.numbers(f"{count}{SCALARS[inner]}"))
            return self.strings(count) if inner == STRING else [self.value(inner) for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"a value is of type {kind}")
        return self.numbers(SCALARS[kind])[0]


def _header(cursor: _Cursor) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]], int]:
    """Metadata; name, shape, format and offset of every tensor; and where offsets count from."""
    magic, version, tensors, values = cursor.numbers("4sIQQ")
    if magic != MAGIC or version not in VERSIONS:
        raise ValueError(f"it begins with {magic!r} and version {version}, expected {MAGIC!r} and version 2 or 3")
    about: dict[str, Any] = {}
    for _ in range(values):
        key = cursor.string()
        about[key] = cursor.value(cursor.numbers("I")[0])
    infos = []
    for _ in range(tensors):
        name, (dimensions,) = cursor.string(), cursor.numbers("I")
        shape = cursor.numbers(f"{dimensions}Q")[::-1]  # columns come first in the file
        kind, offset = cursor.numbers("IQ")
        infos.append((name, shape or (1,), kind, offset))
    step = about.get("general.alignment", 32)
    return about, infos, -(-cursor.at // step) * step
