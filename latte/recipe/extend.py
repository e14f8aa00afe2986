"""Settings of extending a pretrained model: its stages and its evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import PurePath
from typing import Literal

from latte.errors import UserError
from latte.recipe.bounds import check_numbers
from latte.recipe.train import DataRecipe, TrainRecipe

#: The stages in the order in which they run; each is a field of ExtendRecipe.
STAGES = ("transfer", "distil", "lengthen")
#: What retrieval can be measured with.
RETRIEVAL_TASKS = ("fact", "four-facts", "number")


@dataclass
class StageRecipe:
    """One training stage of an extended model."""

    steps: int = 0
    """Optimiser steps; 0 skips the stage."""
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
    """Learning rate at the last step, as a fraction of its peak."""
    weight_decay: float = 0.0
    """Weight decay of matrices."""
    clip_norm: float = 1.0
    """Largest norm of the gradient; 0 does not clip."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""
    log_every: int = 10
    """Steps between logs."""
    eval_every: int = 100
    """Steps between validations; 0 validates at the end only."""
    eval_rows: int = 4
    """Rows of a validation."""
    save_every: int = 50
    """Steps between checkpoints."""

    def check(self, prefix: str) -> None:
        """Compare every number with its bounds.

        Args:
            prefix: of the names in messages.

        Raises:
            UserError: a number is out of bounds.
        """
        least = {"sequence_length": 2, "batch_size": 1, "micro_batch_size": 1, "log_every": 1, "eval_rows": 1}
        check_numbers(self, least, prefix)
        if self.learning_rate == 0:
            raise UserError(f"{prefix}learning_rate is 0, expected more than 0")
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise UserError(f"{prefix}micro_batch_size is {self.micro_batch_size}, expected 1 to {self.batch_size}")

    def train_recipe(self, seed: int) -> TrainRecipe:
        """The stage's settings as those of a training run."""
        shared = {entry.name: getattr(self, entry.name) for entry in fields(StageRecipe)}
        del shared["sequence_length"]
        return TrainRecipe(**{**shared, "steps": max(1, self.steps)}, seed=seed)


@dataclass
class DistilRecipe(StageRecipe):
    """A stage that trains the whole model end to end."""

    divergence: float = 1.0
    """Weight of the divergence from the pretrained model's predictions on the same tokens."""
    next_token: float = 0.0
    """Weight of the next-token loss. Above 0 the model also fits the text, not only the pretrained model."""
    lora_rank: int = 0
    """Also train the pretrained attention projections by LoRA of this rank; 0 trains new weights only."""


@dataclass
class RememberRecipe:
    """How scores of the tokens worth keeping are fitted: after one pass, to attention of the pretrained model."""

    rows: int = 32
    """Rows of text that the scores are fitted on."""
    sequence_length: int = 4096
    """Tokens in a row, at most the context that the pretrained model was made for."""
    sources: list[str] = field(default_factory=list)
    """More texts to fit on, besides data.source: files, as data.source. Rows are taken from all in turn; scores fitted
    on several kinds of text serve more kinds."""
    samples: int = 2048
    """Tokens of a row that scores are fitted on: they stay on disk until the fit."""
    ridge: float = 1e-4
    """Regularisation of both fits: weight of squared coefficients, relative to the squares of their inputs."""
    recency: float | None = None
    """By how much a token's score exceeds that of a token 1,000 places before it with the same content: attention falls
    with the distance. By default it is fitted for each head; 0 keeps old tokens as long as new ones."""
    recall: float = 0.25
    """About this part of the kept tokens is not for prediction but for questions to come: tokens that stay however old
    they are, by the attention that questions about facts pay them. Needs a recency above 0; 0 keeps none."""
    scores: str | None = None
    """Take scores that an earlier run fitted for the same model (OUT-run/remember) instead of fitting them."""
    eval_rows: int = 2
    """Rows on which the captured part of attention is measured."""
    save_every: int = 8
    """Rows between saves."""

    def check(self, prefix: str) -> None:
        """Compare every number with its bounds.

        Raises:
            UserError: a number is out of bounds.
        """
        check_numbers(self, {"rows": 1, "samples": 1, "sequence_length": 2, "eval_rows": 1, "save_every": 1}, prefix)
        if not 0 <= self.recall < 1:
            raise UserError(f"{prefix}recall is {self.recall}, expected a part of the kept tokens: from 0 to below 1")
        if self.recall and self.recency == 0:
            raise UserError(
                f"{prefix}recall is {self.recall} with {prefix}recency 0, expected a recency above 0: without it no "
                "token makes room for another because of its age"
            )


def judged_name(source: str) -> str:
    """The name of a text in the results: that of its file without suffixes."""
    return PurePath(source).name.split(".")[0]


@dataclass
class JudgeRecipe:
    """How an extended model is compared with the pretrained one."""

    contexts: list[int] = field(default_factory=lambda: [1024, 4096])
    """Context lengths for perplexity."""
    sources: list[str] = field(default_factory=list)
    """More texts to measure on, besides the validation part: files, as data.source."""
    max_tokens: int = 32768
    """Tokens of each text, the same ones at each length."""
    max_document_tokens: int | None = None
    """Read at most this much of each document, if there are enough documents; default: all."""
    long_contexts: list[int] = field(default_factory=lambda: [4096, 65536])
    """Context lengths for one long text, the longest document. The pretrained model reads only one stretch of it, at
    original_up_to tokens. Empty skips it."""
    join_documents: bool = False
    """Concatenate all documents of a text and read them as one."""
    original_up_to: int | None = None
    """Longest context for the pretrained model, whose cost is quadratic; default: twice the context it was trained for.
    """
    retrieval_contexts: list[int] = field(default_factory=lambda: [1024, 4096])
    """Context lengths for the retrieval of a fact stated in the text; empty skips it."""
    retrieval_tasks: list[str] = field(default_factory=lambda: list(RETRIEVAL_TASKS))
    """What is stated: one fact; four facts, one of which is asked for; eight numbers, one of which is asked for."""
    retrieval_trials: int = 40
    """Trials at each of five depths."""
    frontier: list[int] = field(default_factory=list)
    """Numbers of tokens in sight (window, sinks and kept) at which windows, kept tokens, latents and all together are
    compared at equal memory. Empty skips it."""
    frontier_context: int = 4096
    """Context length of that comparison, within the pretrained model's own."""
    frontier_documents: int = 16
    """Stretches of each text that it is made on, from as many documents as there are."""
    frontier_recall: bool = True
    """Also compare how often one fact is recalled, at that context."""
    decode_contexts: list[int] = field(default_factory=lambda: [1024, 65536])
    """Context lengths at which time and memory of decoding a token are measured; empty skips it."""
    decode_tokens: int = 32
    """Tokens decoded for each."""

    def __post_init__(self) -> None:
        if not self.contexts:
            raise UserError("judge.contexts is empty, expected at least one length")
        lists = (
            ("contexts", 1),
            ("long_contexts", 1),
            ("retrieval_contexts", 1),
            ("decode_contexts", 2),
            ("frontier", 1),
        )
        for name, least in lists:
            for length in getattr(self, name):
                if length < least:
                    raise UserError(f"judge.{name} has {length}, expected lengths of at least {least}")
        for task in self.retrieval_tasks:
            if task not in RETRIEVAL_TASKS:
                raise UserError(f"judge.retrieval_tasks has {task!r}, expected {', '.join(RETRIEVAL_TASKS)}")
        numbers = (("max_tokens", 2), ("retrieval_trials", 1), ("decode_tokens", 1))
        for name, least in (*numbers, ("frontier_context", 2), ("frontier_documents", 1)):
            if getattr(self, name) < least:
                raise UserError(f"judge.{name} is {getattr(self, name)}, expected at least {least}")
        for name in ("max_document_tokens", "original_up_to"):
            if getattr(self, name) is not None and getattr(self, name) < 2:
                raise UserError(f"judge.{name} is {getattr(self, name)}, expected at least 2")
        names = [*(judged_name(source) for source in self.sources), "validation", "one long text"]
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"judge.sources has two texts called {name!r}, expected files of different names")


@dataclass
class ExtendRecipe:
    """A pretrained model, the layers that replace its attention, and how they are trained."""

    model: str = ""
    """The pretrained model: a folder, a name on the hub, a GGUF file, or smollm2-135m."""
    out: str = "extended"
    """Folder of the extended model, written when everything is done. The run's own folder is OUT-run."""
    window: int = 128
    """Tokens before the current one that the pretrained attention still sees."""
    sinks: int = 4
    """First tokens of the document that it sees as well (attention sinks)."""
    kept: int = 0
    """Tokens behind the window that it goes on to see, per key-value head: those with the best scores, which the stage
    remember fits. 0 keeps none."""
    full_layers: int = 0
    """Layers that keep their attention to all tokens that the model was made for: those whose replacement costs most.
    Their states have room for as many tokens; --dry_run says how much that is."""
    latents: int = 16
    """Latents of each head, which summarise all other tokens."""
    feed: Literal["x", "conv", "rglru"] = "conv"
    """Input of the latents: the layer's input, a short convolution of it, or a gated recurrence over it."""
    coupled: bool = True
    """Window and latents share one softmax over their own scores; else the window's share is learned separately."""
    opening: float | None = None
    """Attention weight of the latents at the start of training; default: the weight that the pretrained attention gives
    to tokens beyond the window."""
    data: DataRecipe = field(default_factory=DataRecipe)
    """Text that the model is taught on: by default Python's own sources, so give data.source for text like yours.
    data.tokenizer and data.sequence_length are not used, the model's own tokenizer and each stage's length are."""
    remember: RememberRecipe = field(default_factory=RememberRecipe)
    """Before all training, if tokens are kept: their scores are fitted to the pretrained model's attention."""
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
    """Seed of the new weights and the order of rows."""
    dry_run: bool = False
    """Only print the cost: parameters, tokens, memory, time on this machine."""

    def stages(self) -> dict[str, StageRecipe]:
        """The stages that have steps, by name, in the order in which they run."""
        every: dict[str, StageRecipe] = {name: getattr(self, name) for name in STAGES}
        return {name: stage for name, stage in every.items() if stage.steps}

    @property
    def attended(self) -> int:
        """Tokens that the pretrained attention sees itself: the latents matter only behind as many."""
        return self.window + self.sinks + self.kept + 1

    @property
    def seen_by(self) -> str:
        """The parts of a layer that see tokens themselves, for messages."""
        return "window, sinks and kept tokens" if self.kept else "window and sinks"

    def __post_init__(self) -> None:
        check_numbers(self, {"latents": 1})
        self.remember.check("remember.")
        if self.kept and self.remember.sequence_length <= self.attended:
            raise UserError(
                f"remember.sequence_length is {self.remember.sequence_length}, expected more than {self.attended}, "
                f"which {self.seen_by} see: with kept {self.kept} nothing would be dropped"
            )
        for name in STAGES:
            getattr(self, name).check(f"{name}.")
        if self.opening is not None and not 0 < self.opening < 1:
            raise UserError(f"opening is {self.opening}, expected a number between 0 and 1")
        for name, stage in self.stages().items():
            if stage.sequence_length <= self.attended:
                raise UserError(
                    f"{name}.sequence_length is {stage.sequence_length}, expected more than {self.attended}, which "
                    f"{self.seen_by} see: the latents would learn nothing"
                )
        if self.distil.lora_rank and self.lengthen.steps and self.lengthen.divergence:
            raise UserError(
                f"lengthen.divergence is {self.lengthen.divergence} after a stage with distil.lora_rank, expected 0: "
                "with its weights changed the model no longer holds its teacher"
            )
