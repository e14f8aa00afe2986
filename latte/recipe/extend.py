"""Settings of extending a pretrained model: its stages, and how it is judged."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Literal

from latte.errors import UserError
from latte.recipe.train import DataRecipe, TrainRecipe

#: The stages in the order in which they run; each is a field of ExtendRecipe.
STAGES = ("transfer", "distil", "lengthen")


@dataclass
class StageRecipe:
    """One stage of teaching an extended model."""

    steps: int = 0
    """Optimiser steps; 0 leaves the stage out."""
    sequence_length: int = 1024
    """Tokens in a row."""
    batch_size: int = 1
    """Rows in a step."""
    micro_batch_size: int | None = None
    """Rows a process reads at once; smaller needs less memory."""
    learning_rate: float = 3e-3
    """Peak learning rate of AdamW."""
    warmup_steps: int = 10
    """Steps in which the learning rate rises from 0 to its peak."""
    final_learning_rate_ratio: float = 0.1
    """What is left of the learning rate at the last step, as a part of its peak."""
    weight_decay: float = 0.0
    """Decay of matrices."""
    clip_norm: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    gradient_checkpointing: bool = False
    """Compute activations twice instead of keeping them."""
    log_every: int = 10
    """Steps between lines of metrics."""
    eval_every: int = 100
    """Steps between validations; 0 validates at the end only."""
    eval_rows: int = 4
    """Rows to validate on."""
    save_every: int = 50
    """Steps between checkpoints."""

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise UserError(f"steps of a stage is {self.steps}, expected at least 0")
        if self.sequence_length < 2:
            raise UserError(f"sequence_length of a stage is {self.sequence_length}, expected at least 2")

    def train_recipe(self, seed: int) -> TrainRecipe:
        """The same in the words of a training run."""
        shared = {entry.name: getattr(self, entry.name) for entry in fields(StageRecipe)}
        del shared["sequence_length"]
        return TrainRecipe(**{**shared, "steps": max(1, self.steps)}, seed=seed)


@dataclass
class DistilRecipe(StageRecipe):
    """A stage that teaches the whole model end to end."""

    divergence: float = 1.0
    """Weight of the divergence from the pretrained model's predictions on the same tokens."""
    next_token: float = 0.0
    """Weight of the next-token loss. Above 0 the model also learns the text itself, not only to be what it was."""
    lora_rank: int = 0
    """Also train the pretrained attention projections, by additions of this rank; 0 trains new weights only."""


@dataclass
class JudgeRecipe:
    """How an extended model is compared with the pretrained one."""

    contexts: list[int] = field(default_factory=lambda: [1024, 4096])
    """Context lengths for perplexity."""
    sources: list[str] = field(default_factory=list)
    """More texts to measure on, beside the validation part: files, as data.source."""
    max_tokens: int = 32768
    """Tokens of each text, at each length the same ones."""
    max_document_tokens: int | None = None
    """Read no more than this of each document, where there are enough of them; default: all."""
    long_contexts: list[int] = field(default_factory=lambda: [4096, 65536])
    """Context lengths to read one long text at, the longest document; without the pretrained model, which gets one
    stretch of it at the length where it is lost. Empty leaves it out."""
    join_documents: bool = False
    """Read all documents of a text as one, one after another."""
    original_up_to: int | None = None
    """Longest context for the pretrained model, whose cost grows with its square; default: twice what it was made for.
    """
    retrieval_contexts: list[int] = field(default_factory=lambda: [1024, 4096])
    """Context lengths in which a fact is hidden and asked for; empty leaves it out."""
    retrieval_trials: int = 4
    """Facts hidden at each depth."""
    decode_contexts: list[int] = field(default_factory=lambda: [1024, 65536])
    """Contexts at which time and memory of writing a token are measured; empty leaves it out."""
    decode_tokens: int = 32
    """Tokens written there."""


@dataclass
class ExtendRecipe:
    """A pretrained model, what its layers become, and how the new part is taught."""

    model: str = ""
    """The pretrained model: a folder, a name on the hub, a GGUF file, or smollm2-135m."""
    out: str = "extended"
    """Folder of the extended model; it appears when all is done. The run itself is in OUT-run beside it."""
    window: int = 128
    """Tokens before the present one that the pretrained attention still sees."""
    sinks: int = 4
    """First tokens of the document that stay in its sight."""
    latents: int = 16
    """Latents of each head, through which everything else is seen."""
    feed: Literal["x", "conv", "rglru"] = "conv"
    """What feeds the latents: the layer's input, a short convolution of it, or a gated recurrence over it."""
    coupled: bool = True
    """Window and latents share one softmax by their own scores; without it the window's share is learned alone."""
    opening: float | None = None
    """Weight that the latents start training with; default: what the pretrained attention gives to all that lies behind
    the window."""
    data: DataRecipe = field(default_factory=DataRecipe)
    """Text; data.tokenizer and data.sequence_length are not used, the model's own tokenizer and each stage's length
    are."""
    transfer: StageRecipe = field(default_factory=lambda: StageRecipe(steps=200))
    """First: every layer's output is fitted to the pretrained layer's on the same input."""
    distil: DistilRecipe = field(default_factory=lambda: DistilRecipe(steps=200, learning_rate=1e-3))
    """Then: the whole model's predictions are fitted to the pretrained model's, within its own context."""
    lengthen: DistilRecipe = field(
        default_factory=lambda: DistilRecipe(
            steps=0, sequence_length=8192, learning_rate=3e-4, divergence=0.0, next_token=1.0
        )
    )
    """Last: longer sequences, beyond what the pretrained model can read."""
    judge: JudgeRecipe = field(default_factory=JudgeRecipe)
    """The comparison at the end."""
    seed: int = 0
    """Of the new weights and the order of rows."""
    dry_run: bool = False
    """Only say what would be done: parameters, tokens, memory, time on this machine."""

    def __post_init__(self) -> None:
        for name, least in (("window", 0), ("sinks", 0), ("latents", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise UserError(f"{name} is {getattr(self, name)}, expected at least {least}")
        if self.opening is not None and not 0 < self.opening < 1:
            raise UserError(f"opening is {self.opening}, expected a number between 0 and 1")
        if self.distil.lora_rank and self.lengthen.steps and self.lengthen.divergence:
            raise UserError(
                f"lengthen.divergence is {self.lengthen.divergence} after a stage with distil.lora_rank, expected 0: "
                "with its weights changed the model no longer holds its teacher"
            )
