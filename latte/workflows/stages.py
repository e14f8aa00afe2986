"""Training an extended model in stages; each stage is a resumable training run with a folder of its own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import TrainingArguments

from latte.data import Batch, Corpus, PackedRows
from latte.errors import UserError
from latte.eval.gap import Gap
from latte.extend.layer import CLOSED
from latte.extend.losses import distillation_loss, teacher_states, transfer_losses
from latte.extend.low_rank import low_rank, without_low_rank
from latte.extend.model import LatteExtendedForCausalLM
from latte.extend.remember import fixed_scores
from latte.files import write_text
from latte.loading.layout import LAYERS, LAYERS_BEFORE, MODEL
from latte.recipe import DistilRecipe, ExtendRecipe, StageRecipe
from latte.train import checkpoint
from latte.train.run import Result, fit, is_finished, share, step_batches
from latte.train.trainer import training_arguments

OPENING_TOKENS = 4096  # that the latents' initial weights are fitted on


@dataclass
class Stage:
    """One stage: its settings, its rows, and the folder of its weights."""

    name: str
    settings: StageRecipe
    folder: Path
    rows: PackedRows
    held_out: PackedRows
    seed: int
    past_teacher: bool = False  # low-rank training changed the pretrained weights before: there is no teacher
    _gap: Gap | None = None

    def run(self, model: LatteExtendedForCausalLM, console: Console) -> Result:
        """Train, resume, or load the finished stage; afterwards the model has the stage's weights."""
        settings = self.settings.train_recipe(self.seed)
        args = training_arguments(self.folder, settings)
        micro, args.gradient_accumulation_steps = share(settings, args.world_size)
        batches = step_batches(self.rows, settings, args, micro)
        first = args.process_index == 0
        with low_rank(model, getattr(self.settings, "lora_rank", 0)):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("lora_" in name)
            for parameter in model.new_parameters().values():
                parameter.requires_grad_(True)
            for parameter in fixed_scores(model):
                parameter.requires_grad_(False)
            before = self.folder / LAYERS_BEFORE
            if first and self.name == "transfer" and not before.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                write_text(before, json.dumps(self.layer_losses(model)) + "\n")
            result = fit(
                model,
                batches,
                self.folder,
                settings,
                args,
                tokens_per_step=settings.batch_size * self.settings.sequence_length,
                evaluate=lambda current: self.validate(current, args),
                loss=self.loss,
                console=console,
            )
            checkpoint.load_model(self.folder / MODEL, model)
        if first and not (self.folder / LAYERS).exists():
            write_text(self.folder / LAYERS, json.dumps(self.layer_losses(model)) + "\n")
        return result

    def is_finished(self) -> bool:
        """Whether its final weights exist."""
        return is_finished(self.folder)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The stage's training loss."""
        inner: Any = getattr(model, "module", model)
        if not isinstance(self.settings, DistilRecipe):
            return transfer_losses(inner, batch["input_ids"], batch["reset"]).mean()
        return self._distil(inner, batch)[0]

    def _distil(self, model: LatteExtendedForCausalLM, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        settings = self.settings
        assert isinstance(settings, DistilRecipe)
        known = None
        if settings.divergence:
            with without_low_rank(model):  # the teacher is the pretrained model, without additions to its weights
                known = teacher_states(model, batch["input_ids"], batch["reset"])
        return distillation_loss(
            model,
            batch["input_ids"],
            batch["labels"],
            batch["reset"],
            known=known,
            divergence=settings.divergence,
            next_token=settings.next_token,
        )

    @torch.no_grad()
    def validate(self, model: nn.Module, args: TrainingArguments) -> dict[str, float]:
        """The stage's losses on validation rows, and the closed part of the gap there."""
        inner: Any = getattr(model, "module", model)
        rows = self._validation_batches(args.device)
        found: dict[str, float] = {}
        if isinstance(self.settings, DistilRecipe):
            parts = torch.tensor([self._distil(inner, row)[1:] for row in rows]).mean(dim=0)
            found["valid_loss"] = next_token = float(parts[1])
            if self.settings.divergence:
                found["valid_divergence"] = float(parts[0])
        else:
            found["valid_loss"] = float(sum(self.loss(inner, row) for row in rows)) / len(rows)
            found["valid_next_token"] = next_token = Gap(rows).loss(inner)
        if self.settings.sequence_length <= inner.own_context and not self.past_teacher:
            if self._gap is None:
                self._gap = Gap(rows)
            closed = self._gap.closed(inner, next_token)
            if closed is not None:
                found["valid_gap_closed"] = closed
        return found

    @torch.no_grad()
    def layer_losses(self, model: LatteExtendedForCausalLM) -> list[float]:
        """Each layer's distance from the pretrained layer on validation rows."""
        rows = self._validation_batches(model.device)
        total = sum(transfer_losses(model, row["input_ids"], row["reset"]) for row in rows)
        assert isinstance(total, Tensor)
        return [round(float(value) / len(rows), 6) for value in total]

    def _validation_batches(self, device: torch.device) -> list[Batch]:
        count = min(self.settings.eval_rows, len(self.held_out))
        chosen = [index * len(self.held_out) // count for index in range(count)]
        return [{name: value.to(device) for name, value in self.held_out.batch([row]).items()} for row in chosen]


def plan_stages(recipe: ExtendRecipe, corpus: Corpus, folder: Path) -> list[Stage]:
    """The stages of a recipe that have steps.

    Raises:
        UserError: too little text for a stage's rows, or documents that end within the window.
    """
    stages: list[Stage] = []
    for name, settings in recipe.stages().items():
        length = settings.sequence_length
        setting = f"{name}.sequence_length"
        rows = PackedRows(corpus.train, length, f"training part, for stage {name},", setting)
        held_out = PackedRows(corpus.valid, length, f"validation part, for stage {name},", setting)
        changed = any(getattr(stage.settings, "lora_rank", 0) for stage in stages)
        stages.append(Stage(name, settings, folder / name, rows, held_out, recipe.seed, changed))
    for part, tokens in (("training", corpus.train), ("validation", corpus.valid)) if stages else ():
        longest = int((tokens.starts[1:] - tokens.starts[:-1]).max())
        if longest <= recipe.attended:
            raise UserError(
                f"the longest document of the {part} part has {longest:,} tokens, and {recipe.seen_by} see "
                f"{recipe.attended:,}: the latents would learn nothing, give longer documents or a shorter --window"
            )
    return stages


@torch.no_grad()
def open_latents(model: LatteExtendedForCausalLM, stage: Stage, share: float | None) -> None:
    """Initialise the latents before the first stage, if they are closed; deterministic, so a restart does the same."""
    biases = [mixer.slot0_bias for mixer in model.mixers if mixer.slot0_bias is not None and not mixer.full]
    if not biases or float(biases[0].min()) < CLOSED:
        return
    count = min(len(stage.rows), -(-OPENING_TOKENS // stage.settings.sequence_length))
    batch = stage.rows.batch([index * len(stage.rows) // count for index in range(count)])
    reset = batch["reset"].to(model.device)
    model.read_as("open", batch["input_ids"].to(model.device), reset=reset, share=share)
