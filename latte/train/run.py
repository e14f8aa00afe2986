"""A training run: its model, batches, folder and result; the same recipe resumes it after an interruption."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments

from latte import memory
from latte.data import Batch, GroupedOrder, Order, Rows, StepBatches
from latte.data.tokenizer import save_tokenizer
from latte.errors import Stopped, UserError
from latte.files import digest_json, whole_folder, write_text
from latte.loading.layout import MODEL, RESULT, TOKENIZER, read_metrics
from latte.models.latents import ROWS, latent_metrics
from latte.recipe import Recipe, TrainRecipe, anchored
from latte.tasks import Task, open_task
from latte.tasks.base import config_of, inner
from latte.train import checkpoint
from latte.train.display import Display, Metrics
from latte.train.folder import from_first, is_finished, run_folder, shared
from latte.train.samples import Forecast, Samples
from latte.train.trainer import LatteTrainer, learning_rate_factor, seed_everything, training_arguments


@dataclass(frozen=True)
class Result:
    """Figures of a finished run."""

    steps: int
    parameters: int
    tokens: int
    valid_loss: float | None
    seconds: float
    tokens_per_second: float
    peak_memory_bytes: int
    valid_accuracy: float | None = None  # of tasks that have answers
    #: First step and total steps of each learning-rate schedule; more than one if the run was made longer.
    schedules: list[list[int]] = field(default_factory=list)


def train(recipe: Recipe, *, console: Console | None = None) -> Result:
    """Train as the recipe says, or resume the run that an earlier call with the same recipe began.

    The final model is in ``out/model``, for ``from_pretrained`` of transformers' Auto classes.

    Raises:
        UserError: settings, text or files that can't be used; a folder of another run; a loss that is not finite.
        Stopped: SIGTERM or SIGINT came; everything is saved.
    """
    recipe = anchored(recipe)
    folder = Path(recipe.out)
    settings = recipe.train
    if recipe.model.pretrained is None:
        config_of(recipe.model)  # raise mistakes in the settings before any slow step
    args = training_arguments(folder, settings)
    console = console or Console(file=sys.stderr, quiet=args.process_index > 0)
    if settings.sample_every and settings.strategy == "fsdp" and args.world_size > 1:
        raise UserError("train.sample_every is set, expected 0 with train.strategy fsdp: no process has a whole model")
    micro, accumulation = share(settings, args.world_size)
    args.gradient_accumulation_steps = accumulation
    with args.main_process_first(desc="preparing the data"):
        task = open_task(recipe, console.print)
    batches = step_batches(task.rows, settings, args, micro, task.order(settings.seed))
    seed_everything(settings.seed)
    model = task.build_model()
    with run_folder(folder, args, task.recipe, task.digest):
        if args.process_index == 0 and not (folder / TOKENIZER).exists():
            with whole_folder(folder / TOKENIZER) as scratch:
                save_tokenizer(task.tokenizer, scratch)
        return fit(
            model,
            batches,
            folder,
            settings,
            args,
            console=console,
            tokenizer=task.tokenizer,
            tokens_per_step=round(settings.batch_size * task.tokens_per_row),
            evaluate=lambda current: {**task.evaluate(current, args, micro), **use_of_latents(current, task, args)},
        )


def use_of_latents(model: nn.Module, task: Task, args: TrainingArguments) -> dict[str, float]:
    """Figures of every layer's latents on held-out rows; none of a sharded model, of which no process has a layer."""
    if args.fsdp:
        return {}
    rows = range(min(ROWS, len(task.held_out)))
    batch = {name: value.to(args.device) for name, value in task.held_out.batch(list(rows)).items()}
    return latent_metrics(inner(model), batch)


def fit(
    model: Any,
    batches: Dataset[Batch],
    folder: Path,
    settings: TrainRecipe,
    args: TrainingArguments,
    *,
    tokens_per_step: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
    loss: Callable[[nn.Module, Batch], Tensor] | None = None,
    console: Console | None = None,
) -> Result:
    """The training loop for any model, batches and loss; resumes from the newest undamaged checkpoint of the folder.

    Call it inside :func:`run_folder`, which locks the folder and checks that it belongs to this run.
    """
    console = console or Console(file=sys.stderr, quiet=args.process_index > 0)
    done = _finished_result(folder)
    if done is not None and done.steps >= settings.steps and is_finished(folder):
        console.print(f"{folder} is finished already: nothing to do")
        return done
    first = args.process_index == 0
    step = from_first(args, lambda: checkpoint.newest(folder, console.print))
    if step is None and done is not None:
        raise UserError(
            f"{folder} was trained for {done.steps} steps and keeps no checkpoint to go on from: begin a new run from "
            f"its model with --model.pretrained {folder}"
        )
    trainer: LatteTrainer
    metrics = Metrics(folder, tokens_per_step, lambda: trainer.progress)
    shows: list[Metrics | Display] = [metrics, Display(metrics, console, folder.name)] if first else []
    extra: list[TrainerCallback] = [Forecast(console, peak_memory)] if first else []
    if first and settings.sample_every and tokenizer is not None:
        extra.append(Samples(folder, model, tokenizer, settings, console))
    trainer = LatteTrainer(model, args, batches, settings, evaluate=evaluate, loss=loss, callbacks=[*shows, *extra])
    if step is not None:
        trainer.schedules = _schedules(checkpoint.path_of(folder, step), settings)
        console.print(f"going on from step {step} of {settings.steps}{_rates(trainer.schedules, settings)}")
    try:
        if step is None or step < settings.steps:
            trainer.resume_or_start(step)
        else:  # killed between the last checkpoint and the final model
            checkpoint.load_model(checkpoint.path_of(folder, step), trainer.model)
            trainer.progress = checkpoint.read(checkpoint.path_of(folder, step), "training")["progress"]
            trainer.state.global_step = step
    finally:
        for show in shows:
            show.close()
    if trainer.state.global_step < settings.steps:
        number = trainer.signal_number or 15
        raise Stopped(
            f"stopped at step {trainer.state.global_step} of {settings.steps}, saved: the same command goes on", number
        )
    return _finish(trainer, folder, tokenizer, tokens_per_step)


def _finished_result(folder: Path) -> Result | None:
    """The result of a run that was finished, perhaps with fewer steps than it has now."""
    path = folder / RESULT
    return Result(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _schedules(path: Path, settings: TrainRecipe) -> list[list[int]]:
    """The learning-rate schedules of a run up to a checkpoint, and the one that it goes on with."""
    state = checkpoint.read(path, "trainer_state")
    found = checkpoint.read(path, "training").get("schedules") or [[0, state["max_steps"]]]
    return found if found[-1][1] == settings.steps else [*found, [state["global_step"], settings.steps]]


def _rates(schedules: list[list[int]], settings: TrainRecipe) -> str:
    """What a run that was made longer does with its learning rate, if that changes."""
    if len(schedules) < 2 or settings.decay == "constant":
        return ""
    (_, before), (step, _) = schedules[-2:]
    old, new = (
        settings.learning_rate * learning_rate_factor(step, replace(settings, steps=steps))
        for steps in (before, settings.steps)
    )
    if new == old:
        return ""
    return f"; the learning rate follows a schedule of {settings.steps} steps now ({new:.3g}, it had come to {old:.3g})"


def share(settings: TrainRecipe, world_size: int) -> tuple[int, int]:
    """Rows of a micro-batch, and the number of micro-batches that a process accumulates per step.

    Raises:
        UserError: the batch can't be divided evenly.
    """
    micro = settings.micro_batch_size or max(1, settings.batch_size // world_size)
    if settings.batch_size % (micro * world_size):
        raise UserError(
            f"train.batch_size is {settings.batch_size}, expected a multiple of {micro * world_size}: "
            f"{world_size} process{'es' * (world_size > 1)} with {micro} rows at once"
        )
    return micro, settings.batch_size // (micro * world_size)


def step_batches(
    rows: Rows, settings: TrainRecipe, args: TrainingArguments, micro: int, order: Order | GroupedOrder | None = None
) -> StepBatches:
    """The micro-batches of this process."""
    return StepBatches(
        rows,
        seed=settings.seed,
        steps=settings.steps,
        batch_size=settings.batch_size,
        micro_batch_size=micro,
        rank=args.process_index,
        world_size=args.world_size,
        order=order,
    )


def _finish(trainer: LatteTrainer, folder: Path, tokenizer: Any, tokens_per_step: int) -> Result:
    state = checkpoint.model_state(trainer.model)
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    lines = read_metrics(folder)
    valid: dict[str, Any] = next((line for line in reversed(lines) if "valid_loss" in line), {})
    seconds = (shared(round(1000 * trainer.progress.get("metrics", {}).get("seconds", 0)), trainer.args) or 0) / 1000
    tokens = trainer.settings.steps * tokens_per_step
    result = Result(
        steps=trainer.settings.steps,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        tokens=tokens,
        valid_loss=valid.get("valid_loss"),
        valid_accuracy=valid.get("valid_accuracy"),
        seconds=seconds,
        tokens_per_second=round(tokens / max(seconds, 1e-9), 1),
        peak_memory_bytes=peak_memory(),
        schedules=trainer.schedules,
    )
    if trainer.args.process_index == 0:
        try:
            with whole_folder(folder / MODEL, weights=digest_json(sorted(state))) as scratch:
                checkpoint.write_model(scratch, model, state)
                if tokenizer is not None:
                    save_tokenizer(tokenizer, scratch)
            # Last: a result of more steps beside the model of fewer would pass for a finished run.
            write_text(folder / RESULT, json.dumps(asdict(result), indent=1) + "\n")
        except OSError as error:
            raise UserError(
                f"the final model could not be written ({error.strerror}): all is in the last checkpoint"
            ) from error
    if trainer.args.world_size > 1:
        torch.distributed.barrier()
    return result


def peak_memory() -> int:
    """Peak memory of this process in bytes; on the GPU if there is one."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    return memory.peak_memory()
