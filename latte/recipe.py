"""What a recipe says about data. Imports nothing heavy, so that help and error messages come at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from latte.errors import UserError


@dataclass
class DataRecipe:
    """Where text comes from, how it is split, and how it becomes tokens."""

    source: str = "python-stdlib"
    """python-stdlib (the source code of the running Python's standard library), a file or folder (text, JSON lines or
    parquet, plain or .gz), or hf:NAME for a Hugging Face dataset."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """What the files are; auto goes by their names."""
    text_field: str = "text"
    """Where the text stands in each JSON line, parquet row or dataset row."""
    separator: str | None = None
    """Cut text files into documents wherever this stands; otherwise each file is one document."""
    limit_bytes: int | None = None
    """Read no more than this much text."""
    hf_config: str | None = None
    """Configuration of the Hugging Face dataset."""
    hf_split: str = "train"
    """Split of the Hugging Face dataset."""
    valid_source: str | None = None
    """Text to validate on, of the same format; otherwise some documents of source are kept for it."""
    valid_fraction: float = 0.05
    """Part of the documents (with split tail, of the text) that is kept for validation."""
    split: Literal["document", "tail"] = "document"
    """document: each document is in one part, chosen by a hash of it; tail: the end of the text is for validation."""
    split_seed: int = 0
    """Another number, another choice of documents."""
    tokenizer: str = "bpe"
    """bpe (byte-level, trained on the training part), bytes, or any tokenizer of transformers by folder or name."""
    vocab_size: int = 4096
    """Entries of the bpe that is trained here."""
    sequence_length: int = 512
    """Tokens in a training row. Documents are packed into rows; nothing crosses from one into another."""
    cache: str | None = None
    """Folder of token files; the default is $LATTE_CACHE, or ~/.cache/latte."""

    def __post_init__(self) -> None:
        if not 0 < self.valid_fraction < 1:
            raise UserError(f"data.valid_fraction is {self.valid_fraction}, expected a number between 0 and 1")
        if self.sequence_length < 2:
            raise UserError(f"data.sequence_length is {self.sequence_length}, expected at least 2")
        if self.limit_bytes is not None and self.limit_bytes < 1:
            raise UserError(f"data.limit_bytes is {self.limit_bytes}, expected at least 1")
        if self.separator == "":
            raise UserError("data.separator is empty, expected some text or nothing at all")
        if self.tokenizer == "bpe" and self.vocab_size < 257:
            raise UserError(
                f"data.vocab_size is {self.vocab_size}, expected at least 257: 256 bytes and the end of text"
            )
