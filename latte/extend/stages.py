"""Teaching an extended model in stages; each is a training run of its own folder that any end can interrupt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import TrainingArguments

from latte.data import Corpus, Rows, StepBatches
from latte.extend.layer import CLOSED
from latte.extend.losses import distillation_loss, teacher_states, transfer_losses
from latte.extend.model import LatteExtendedForCausalLM
from latte.files import write_text
from latte.recipe import DistilRecipe, ExtendRecipe, StageRecipe
from latte.train import checkpoint
from latte.train.run import FINAL, Result, fit, share
from latte.train.trainer import Batch, training_arguments

#: In the order in which they run; each is a field of the recipe.
STAGES = ("transfer", "distil", "lengthen")
ATTENTION_PROJECTIONS = r".*\.attention\.(q_proj|k_proj|v_proj|o_proj)"


@dataclass
class Stage:
    """One stage: its settings, the rows it reads, and where it leaves its weights."""

    name: str
    settings: StageRecipe
    folder: Path
    rows: Rows
    held_out: Rows
    seed: int

    def run(self, model: LatteExtendedForCausalLM, console: Console) -> Result:
        """Train, or go on, or only load what was trained before; the model then has the stage's weights."""
        settings = self.settings.train_recipe(self.seed)
        args = training_arguments(self.folder, settings)
        micro, args.gradient_accumulation_steps = share(settings, args.world_size)
        batches = StepBatches(
            self.rows,
            seed=settings.seed,
            steps=settings.steps,
            batch_size=settings.batch_size,
            micro_batch_size=micro,
            rank=args.process_index,
            world_size=args.world_size,
        )
        first = args.process_index == 0
        with low_rank(model, self.settings):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("lora_" in name)
            for parameter in model.new_parameters().values():
                parameter.requires_grad_(True)
            before = self.folder / "layers_before.json"
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
            checkpoint.load_model(self.folder / FINAL, model)
        if first and not (self.folder / "layers.json").exists():
            write_text(self.folder / "layers.json", json.dumps(self.layer_losses(model)) + "\n")
        return result

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """What the stage lowers."""
        inner: Any = getattr(model, "module", model)
        if not isinstance(self.settings, DistilRecipe):
            return transfer_losses(inner, batch["input_ids"], batch["reset"]).mean()
        return self._distil(inner, batch)[0]

    def _distil(self, model: LatteExtendedForCausalLM, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        settings = self.settings
        assert isinstance(settings, DistilRecipe)
        known = None
        if settings.divergence:
            with _without_low_rank(model):  # the pretrained model knows nothing of additions to its weights
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
        """The stage's losses on rows that are not trained on."""
        inner: Any = getattr(model, "module", model)
        totals: dict[str, float] = {}
        chosen = self._validation_rows()
        for row in chosen:
            batch = {name: value.to(args.device) for name, value in self.held_out.batch([row]).items()}
            if isinstance(self.settings, DistilRecipe):
                _, divergence, cross_entropy = self._distil(inner, batch)
                found = {"valid_loss": float(cross_entropy), "valid_divergence": float(divergence)}
            else:
                losses = transfer_losses(inner, batch["input_ids"], batch["reset"])
                found = {"valid_loss": float(losses.mean())}
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + value / len(chosen)
        return totals

    @torch.no_grad()
    def layer_losses(self, model: LatteExtendedForCausalLM) -> list[float]:
        """Each layer's distance from the pretrained layer on held-out rows."""
        chosen = self._validation_rows()
        device = model.device
        total = sum(
            transfer_losses(model, batch["input_ids"].to(device), batch["reset"].to(device))
            for batch in (self.held_out.batch([row]) for row in chosen)
        )
        assert isinstance(total, Tensor)
        return [round(float(value) / len(chosen), 6) for value in total]

    def _validation_rows(self) -> list[int]:
        count = min(self.settings.eval_rows, len(self.held_out))
        return [index * len(self.held_out) // count for index in range(count)]


def plan_stages(recipe: ExtendRecipe, corpus: Corpus, folder: Path) -> list[Stage]:
    """The stages that a recipe asks for.

    Raises:
        UserError: too little text for a stage's rows.
    """
    stages = []
    for name in STAGES:
        settings: StageRecipe = getattr(recipe, name)
        if settings.steps:
            length = settings.sequence_length
            rows = Rows(corpus.train, length, f"training part, for stage {name},")
            held_out = Rows(corpus.valid, length, f"validation part, for stage {name},")
            stages.append(Stage(name, settings, folder / name, rows, held_out, recipe.seed))
    return stages


@torch.no_grad()
def open_latents(model: LatteExtendedForCausalLM, stage: Stage, share: float) -> None:
    """Let closed latents into the softmax before the first stage; always the same way, so that a restart is too."""
    bias = model.mixers[0].slot0_bias
    if bias is None or float(bias.min()) < CLOSED:
        return
    batch = stage.rows.batch([0])
    model.read(batch["input_ids"].to(model.device), mode="open", share=share)


@contextmanager
def low_rank(model: LatteExtendedForCausalLM, settings: StageRecipe) -> Iterator[None]:
    """The model with low-rank additions to its attention projections while the stage lasts; merged when it is done."""
    rank = getattr(settings, "lora_rank", 0)
    if not rank:
        yield
        return
    from peft import LoraConfig, LoraModel

    torch.manual_seed(0)
    tuner = LoraModel(model, LoraConfig(r=rank, lora_alpha=rank, target_modules=ATTENTION_PROJECTIONS), "default")
    yield
    tuner.merge_and_unload()


@contextmanager
def _without_low_rank(model: nn.Module) -> Iterator[None]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
