"""Settings of what reads or writes with a trained model: scoring and generating."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from latte.errors import UserError


@dataclass
class EvalRecipe:
    """What to evaluate, on what, at which lengths."""

    model: str = "runs/latest"
    """A run's folder, a model's folder, or a name on the hub."""
    source: str | None = None
    """Text to evaluate on, as data.source of a training recipe; the default is the run's own validation part."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """What the files are; auto goes by their names."""
    text_field: str = "text"
    """Where the text stands in each JSON line, parquet row or dataset row."""
    separator: str | None = None
    """Cut text files into documents wherever this stands."""
    tokenizer: str | None = None
    """A tokenizer's folder or name; the default is the model's own."""
    contexts: list[int] = field(default_factory=list)
    """Context lengths; the default is a quarter of the training length to eight times it."""
    max_tokens: int = 100_000
    """How many tokens to read, at each length the same ones."""
    min_document_tokens: int = 0
    """Leave out shorter documents: only long ones tell something about long contexts."""
    max_document_tokens: int | None = None
    """Read no more of each document, so that the tokens come from many; default: all."""
    join_documents: bool = False
    """Read all documents as one, one after another."""
    out: str | None = None
    """A JSON file for the figures."""

    def __post_init__(self) -> None:
        if self.max_tokens < 2:
            raise UserError(f"max_tokens is {self.max_tokens}, expected at least 2")


@dataclass
class GenerateRecipe:
    """What to read, and how to go on with it."""

    model: str = "runs/latest"
    """A run's folder, a model's folder, or a name on the hub."""
    prompt: str | None = None
    """Text to continue."""
    prompt_file: str | None = None
    """A file to continue, of any length; - is standard input."""
    load_state: str | None = None
    """Go on from what --save_state kept; a prompt is then read after it."""
    save_state: str | None = None
    """Keep what was read, before anything is written, in a folder of this name."""
    max_new_tokens: int = 200
    """How many tokens to write at most; 0 only reads."""
    temperature: float = 0.8
    """Below 1 prefers likely tokens; 0 always takes the likeliest."""
    top_k: int = 0
    """Choose among this many likeliest tokens; 0 among all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Leave out tokens less likely than this part of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that were written already less likely."""
    seed: int = 0
    """Of the choices."""
    stop_at_end: bool = True
    """Stop where the model ends its document."""
    chunk: int = 512
    """Tokens of the prompt read at once."""

    def __post_init__(self) -> None:
        bounds: dict[str, tuple[int, int | None]]
        bounds = {"max_new_tokens": (0, None), "temperature": (0, None), "top_k": (0, None), "chunk": (1, None)}
        bounds |= {"top_p": (0, 1), "min_p": (0, 1)}
        for name, (least, most) in bounds.items():
            value = getattr(self, name)
            if value < least or (most is not None and value > most):
                raise UserError(
                    f"{name} is {value}, expected at least {least}" + (f" and at most {most}" if most else "")
                )
        if self.top_p == 0:
            raise UserError("top_p is 0, expected more than 0 and at most 1")
        if self.repetition_penalty <= 0:
            raise UserError(f"repetition_penalty is {self.repetition_penalty}, expected more than 0")
        if self.prompt is not None and self.prompt_file is not None:
            raise UserError("both prompt and prompt_file were given, expected one of them")
