"""Samples of tokens that scores are fitted to, on disk: a file for each row of text, read layer by layer."""

from __future__ import annotations

from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from latte.extend.attention_rate import Samples
from latte.files import remove


class SampleFiles:
    """A folder of samples; memory holds those of one row, or of one layer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._row: dict[str, Tensor] = {}

    def add(self, layer: int, samples: Samples) -> None:
        """Add what was taken of a row in one layer."""
        for name, value in zip(Samples._fields, samples, strict=True):
            self._row[f"{layer}.{name}"] = value.cpu().contiguous()

    def write(self, row: int) -> None:
        """Write what was added, as those of a row: a file appears once it is whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch = self._file(row).with_suffix(".part")
        safetensors.torch.save_file(self._row, scratch)
        scratch.replace(self._file(row))
        self._row = {}

    def has(self, rows: int) -> bool:
        """Whether the first ``rows`` rows are there."""
        return all(self._file(row).is_file() for row in range(rows))

    def of_layer(self, layer: int, rows: int) -> Samples:
        """Those of all rows in one layer."""
        parts: list[list[Tensor]] = [[] for _ in Samples._fields]
        for row in range(rows):
            with safetensors.safe_open(self._file(row), framework="pt") as file:
                for part, name in zip(parts, Samples._fields, strict=True):
                    part.append(file.get_tensor(f"{layer}.{name}"))
        return Samples(*(torch.cat(part) for part in parts))

    def remove(self) -> None:
        remove(self.folder)

    def _file(self, row: int) -> Path:
        return self.folder / f"{row:06}.safetensors"
