"""Settings of a training run: text, model, and how it is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from latte.errors import UserError
from latte.recipe.bounds import check_numbers
from latte.recipe.tasks import ClassifyRecipe, RecallRecipe, TaskName

AUTO = "auto"


@dataclass
class DataRecipe:
    """Where text comes from, how it is split, and how it becomes tokens."""

    source: str = "python-stdlib"
    """python-stdlib (the source code of the running Python's standard library), a file or folder (text, JSON lines or
    parquet, plain or .gz), or hf:NAME for a Hugging Face dataset."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """Format of the files; auto chooses by their suffixes."""
    text_field: str = "text"
    """Field of a JSON line, parquet row or dataset row that contains the text."""
    separator: str | None = None
    r"""String that separates documents in text files, with \n for a line end, \t for a tab and \\ for a backslash; by
    default each file is one document."""
    encoding: str = "utf-8"
    """Encoding of text files and JSON lines, by any name that Python knows. Bytes that it can't decode are counted."""
    limit_bytes: int | None = None
    """Read no more than this much text."""
    hf_config: str | None = None
    """Configuration of the Hugging Face dataset."""
    hf_split: str = "train"
    """Split of the Hugging Face dataset."""
    valid_source: str | None = None
    """Text to validate on, of the same format; by default a part of source is used."""
    valid_fraction: float = 0.05
    """Fraction of the documents (with split tail, of the text) used for validation."""
    split: Literal["document", "tail"] = "document"
    """document: a hash of each document decides its part; tail: the end of the text is for validation, which is also
    done where the documents are so few that one part would have none."""
    split_seed: int = 0
    """Seed of the choice of validation documents."""
    tokenizer: str = AUTO
    """bpe (byte-level, trained on the training part), bytes, or any tokenizer of transformers by folder or name; auto
    is the tokenizer of model.pretrained, or else bpe."""
    vocab_size: int = 4096
    """Vocabulary of the bpe that is trained here."""
    sequence_length: int = 512
    """Tokens in a training row. Documents are packed into rows and do not see each other."""
    cache: str | None = None
    """Folder of token files; the default is $LATTE_CACHE, or ~/.cache/latte."""

    def __post_init__(self) -> None:
        if not 0 < self.valid_fraction < 1:
            raise UserError(f"data.valid_fraction is {self.valid_fraction}, expected a number between 0 and 1")
        check_numbers(self, {"sequence_length": 2, "limit_bytes": 1, "split_seed": -math.inf}, "data.")
        if self.separator == "":
            raise UserError("data.separator is empty, expected some text or nothing at all")
        try:
            b"a".decode(self.encoding)
        except UnicodeDecodeError:
            pass  # an encoding of other widths than one byte
        except (LookupError, ValueError):
            raise UserError(
                f"data.encoding is {self.encoding!r}, expected the name of a text encoding, such as utf-8 or latin-1"
            ) from None
        if self.tokenizer in ("bpe", AUTO) and self.vocab_size < 257:
            raise UserError(
                f"data.vocab_size is {self.vocab_size}, expected at least 257: 256 bytes and the end of text"
            )


@dataclass
class ModelRecipe:
    """Which model to train."""

    variant: str = "latte-r-swa++"
    """latte, latte++, latte-conv++, latte-conv-swa++, latte-r++, latte-r-swa++, r-swa++ or transformer++."""
    size: str = "tiny"
    """tiny, small or paper-150m."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of LatteConfig or options of the mixer that replace the preset's, such as hidden_size or window."""
    pretrained: str | None = None
    """A model's folder or name on the hub to start from, instead of new weights; its tokenizer is used, and variant and
    size are not."""


@dataclass
class TrainRecipe:
    """How to train it."""

    steps: int = 1000
    """Optimiser steps. A run may be made longer afterwards: it goes on from its last state, with the learning rates of
    a schedule of the new length."""
    batch_size: int = 16
    """Rows in a step, over all processes and accumulated micro-batches: independent of the number of processes."""
    micro_batch_size: int | None = None
    """Rows a process reads at once; smaller needs less memory. The default is the process's whole part of the batch."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    warmup_steps: int = 100
    """Steps in which the learning rate rises from 0 to its peak."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after its peak."""
    final_learning_rate_ratio: float = 0.1
    """Learning rate at the last step, as a fraction of its peak."""
    weight_decay: float = 0.1
    """Weight decay of matrices; vectors (norms, biases, gates) have none."""
    beta1: float = 0.9
    """AdamW's decay of the mean gradient."""
    beta2: float = 0.95
    """AdamW's decay of the mean square."""
    epsilon: float = 1e-8
    """AdamW's epsilon."""
    clip_norm: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto is bfloat16 on GPUs that support it, float32 otherwise."""
    strategy: Literal["ddp", "fsdp"] = "ddp"
    """With several processes, each has the whole model (ddp) or a shard of it (fsdp)."""
    seed: int = 0
    """Seed of the weights, the order of rows and dropout."""
    log_every: int = 10
    """Steps between logs."""
    eval_every: int = 200
    """Steps between validations; 0 validates at the end only."""
    eval_rows: int = 64
    """Rows of a validation."""
    sample_every: int = 0
    """Steps between samples of what the model writes, shown and kept in samples.jsonl; 0 writes none."""
    sample_prompt: str = ""
    """Text that a sample continues."""
    sample_tokens: int = 60
    """Tokens of a sample."""
    save_every: int = 200
    """Steps between checkpoints; 0 saves at the end only, and after a signal."""
    keep_checkpoints: int = 2
    """Number of checkpoints to keep; with 2 or more, a damaged one costs save_every steps and not the run."""

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch_size": 1, "micro_batch_size": 1, "log_every": 1, "eval_rows": 1}
        least |= {"keep_checkpoints": 1, "sample_tokens": 1}
        check_numbers(self, least, "train.", {"beta1": 0.9999999, "beta2": 0.9999999})
        if self.learning_rate <= 0:
            raise UserError(f"train.learning_rate is {self.learning_rate}, expected more than 0")
        if self.micro_batch_size is not None and not 1 <= self.micro_batch_size <= self.batch_size:
            raise UserError(f"train.micro_batch_size is {self.micro_batch_size}, expected 1 to {self.batch_size}")


@dataclass
class Recipe:
    """A training run; the same recipe and seed give the same weights."""

    out: str = "runs/latest"
    """The run's folder: settings, tokenizer, checkpoints, metrics, final model. The same command resumes it."""
    data: DataRecipe = field(default_factory=DataRecipe)
    """Text and tokens."""
    model: ModelRecipe = field(default_factory=ModelRecipe)
    """The model."""
    train: TrainRecipe = field(default_factory=TrainRecipe)
    """The training."""
    task: TaskName = "language"
    """language (predict the next token of a text), recall (values that were stated with keys) or classify."""
    recall: RecallRecipe = field(default_factory=RecallRecipe)
    """Examples of task recall."""
    classify: ClassifyRecipe = field(default_factory=ClassifyRecipe)
    """Examples of task classify."""
