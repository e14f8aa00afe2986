"""transformers' Trainer with its own order of data and checkpoints; it stops before a step that is not finite."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from accelerate import DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from latte.data import Batch
from latte.errors import NotFinite, UserError
from latte.files import digest_json
from latte.layers.marks import decays, marks_of
from latte.recipe import TrainRecipe
from latte.train import checkpoint


def training_arguments(folder: Path, settings: TrainRecipe, accumulation: int = 1) -> TrainingArguments:
    """A recipe as transformers' arguments; with several processes this initialises torch.distributed."""
    on_cpu = not torch.cuda.is_available()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1  # set by torchrun and by accelerate launch
    bfloat16 = settings.precision == "bfloat16" or (
        settings.precision == "auto" and not on_cpu and torch.cuda.is_bf16_supported()
    )
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        gradient_accumulation_steps=accumulation,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_epsilon=settings.epsilon,
        max_grad_norm=settings.clip_norm,
        optim="adamw_torch_fused",
        bf16=bfloat16,
        gradient_checkpointing=settings.gradient_checkpointing,
        seed=settings.seed,
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,  # the filter would hide losses that must stop the run
        save_strategy="no",  # Schedule decides, by the same rule after a restart
        disable_tqdm=True,
        log_level="error",
        report_to="none",
        remove_unused_columns=False,
        ignore_data_skip=True,  # batches are a function of the step: there is nothing to skip
        use_cpu=on_cpu,
        use_cache=True,  # the default would be written into the configuration of the trained model
        ddp_backend="gloo" if on_cpu and several else None,
        ddp_find_unused_parameters=False,
        fsdp=True if settings.strategy == "fsdp" and several else None,  # type: ignore[arg-type]
    )


def learning_rate_factor(step: int, settings: TrainRecipe) -> float:
    """The learning rate of a step, relative to its peak."""
    if step < settings.warmup_steps:
        return (step + 1) / (settings.warmup_steps + 1)
    if settings.decay == "constant":
        return 1.0
    done = min(1.0, (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps))
    shape = 0.5 * (1 + math.cos(math.pi * done)) if settings.decay == "cosine" else 1 - done
    return settings.final_learning_rate_ratio + (1 - settings.final_learning_rate_ratio) * shape


def split_by_learning_rate(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Give parameters whose marks ask for another learning rate groups of their own."""
    marks = marks_of(model)
    factors = {id(p): marks[name].learning_rate for name, p in model.named_parameters() if name in marks}
    for group in list(optimizer.param_groups):
        by_factor: dict[float, list[Tensor]] = {}
        for parameter in group["params"]:
            by_factor.setdefault(factors.get(id(parameter), 1.0), []).append(parameter)
        group["params"] = by_factor.pop(1.0, [])
        for factor in sorted(by_factor):
            settings = {name: value for name, value in group.items() if name != "params"}
            optimizer.add_param_group({**settings, "params": by_factor[factor], "lr": factor * group["lr"]})


class LatteTrainer(Trainer):
    """Trains on numbered batches; order and randomness are functions of the seed and the batch's number.

    Args:
        batches: item n is micro-batch n of the run, of this process.
        evaluate: gives metrics of the model as it is; called on every process.
        loss: of the model and a micro-batch, where it is not the model's own.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: Any,
        args: TrainingArguments,
        batches: Dataset[Batch],
        settings: TrainRecipe,
        *,
        evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
        loss: Callable[[nn.Module, Batch], Tensor] | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ) -> None:
        self.folder, self.settings, self.batches = Path(str(args.output_dir)), settings, batches
        self.evaluation, self.loss = evaluate, loss
        self.signal_number: int | None = None
        self.stopping = False
        self.progress: dict[str, Any] = {}  # of the callbacks, saved with every checkpoint
        self.schedules: list[list[int]] = [[0, settings.steps]]  # first step and length of each, saved as well
        self._step_batches: list[Batch] = []
        self._step_losses: list[Tensor] = []
        super().__init__(model=model, args=args, train_dataset=batches, callbacks=[Schedule(self), *(callbacks or [])])
        self.remove_callback(PrinterCallback)
        if loss is not None:
            self.loss_is_scaled_for_ga = False

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and not self.is_fsdp_enabled:
            # accelerate ignores fsdp on CPUs, although torch supports it: set its state by hand.
            state = self.accelerator.state
            # Every new AcceleratorState copies the PartialState over itself: both must be set.
            state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
            state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True

    # Order and randomness

    def get_train_dataloader(self) -> DataLoader[Batch]:
        # Not prepared by accelerate, which would distribute the batches over the processes a second time.
        sampler = _From(self.state.global_step * self.args.gradient_accumulation_steps, self.batches)
        return DataLoader(self.batches, batch_size=None, sampler=sampler)

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> Any:
        # One epoch is the whole run, also when it is resumed in the middle.
        rows = self.settings.batch_size
        total = args.max_steps * args.gradient_accumulation_steps
        return 1, args.max_steps, args.max_steps * rows, args.max_steps * rows, rows, total, args.max_steps

    def training_step(self, model: nn.Module, inputs: Batch, num_items_in_batch: Any = None) -> Tensor:
        place = (self.settings.seed, self.state.global_step, len(self._step_batches), self.args.process_index)
        torch.manual_seed(int(digest_json(place)[:15], 16))
        self._step_batches.append(inputs)
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._step_losses.append(loss)
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.loss is None:
            if self.model.can_generate():  # classifiers have no cache to leave out
                inputs = {**inputs, "use_cache": False}  # type: ignore[dict-item]
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return self.loss(model, inputs)

    # Optimiser

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        marks = marks_of(model)
        return [name for name, parameter in model.named_parameters() if decays(parameter, marks.get(name))]

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            optimizer = super().create_optimizer(model)
            split_by_learning_rate(optimizer, self.model if model is None else model)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            factor = lambda step: learning_rate_factor(step, self.settings)  # noqa: E731
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> float:
        """Called after a step's gradient is accumulated and before it is applied: the last moment to stop."""
        norm = super()._get_grad_norm(model, grad_norm)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        losses = torch.stack(self._step_losses)
        batches, self._step_batches, self._step_losses = self._step_batches, [], []
        finite = math.isfinite(norm) and bool(losses.isfinite().all())
        broken, stopping = self._agree(not finite, self.signal_number is not None)
        if broken:
            where = None if finite else self._leave(batches, losses)
            raise NotFinite(
                f"the loss or its gradient is not finite at step {self.state.global_step + 1} (loss "
                f"{float(losses.sum()):.4g}, gradient norm {norm:.4g}): stopped before the optimiser step"
                + (f"; the batch is in {where}" if where else "")
            )
        self.stopping = stopping
        return norm

    def _agree(self, *flags: bool) -> list[bool]:
        """Each flag, true if it is true on any process."""
        if self.args.world_size == 1:
            return list(flags)
        votes = torch.tensor(flags, dtype=torch.int32, device=self.args.device)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MAX)
        return [bool(vote) for vote in votes]

    def _leave(self, batches: list[Batch], losses: Tensor) -> Path | None:
        path = (
            self.folder / f"not-finite-step-{self.state.global_step + 1:06d}-rank-{self.args.process_index}.safetensors"
        )
        tensors = {
            f"{number}.{name}": value.cpu() for number, batch in enumerate(batches) for name, value in batch.items()
        }
        try:
            safetensors.torch.save_file({"losses": losses.cpu(), **tensors}, path)
        except (OSError, safetensors.SafetensorError):
            return None  # a full disk must not hide the message about the loss
        return path

    # Validation

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if self.evaluation is None:
            return {}
        model = self.model_wrapped
        model.eval()
        watch = model.register_forward_pre_hook(self._watch)
        try:
            with torch.no_grad():
                metrics = self.evaluation(model)
        except _Interrupted:
            # Save now; the resumed run validates first.
            self.progress["validation_due"] = True
            self.control.should_save = self.control.should_training_stop = True
            return {}
        finally:
            watch.remove()
            model.train()
        self.log(dict(metrics))
        return metrics

    def _watch(self, *args: Any) -> None:
        # Several processes would have to agree on it, so only a single-process run interrupts a validation.
        if (
            self.signal_number is not None
            and self.args.world_size == 1
            and self.state.global_step < self.settings.steps
        ):
            raise _Interrupted

    # Checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        weights = checkpoint.model_state(self.model)
        optimizer = checkpoint.optimizer_state(self.model, inner)
        failure = None
        if self.args.process_index == 0:
            self.state.log_history = []  # metrics.jsonl contains it
            self.progress["trainer"] = {
                "loss_since_log": float(self._tr_loss),
                "last_logged": self._globalstep_last_logged,
            }
            scheduler = {key: value for key, value in self.lr_scheduler.state_dict().items() if key != "lr_lambdas"}
            progress = {
                "trainer_state": dataclasses.asdict(self.state),
                "training": {"scheduler": scheduler, "progress": self.progress, "schedules": self.schedules},
            }
            unwrapped = self.accelerator.unwrap_model(self.model)
            try:
                checkpoint.save(
                    self.folder,
                    self.state.global_step,
                    unwrapped,
                    weights,
                    optimizer,
                    progress,
                    self.settings.keep_checkpoints,
                )
            except UserError as error:
                failure = error
        if self._agree(failure is not None)[0]:  # otherwise the other processes would wait forever
            raise failure or UserError("the first process could not write a checkpoint")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        checkpoint.load_model(Path(resume_from_checkpoint), self.model if model is None else model)

    def _load_optimizer_and_scheduler(self, path: str | None) -> None:
        if path is None:
            return
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        checkpoint.load_optimizer(Path(path), self.model, inner)
        saved = checkpoint.read(Path(path), "training")
        self.lr_scheduler.load_state_dict({**self.lr_scheduler.state_dict(), **saved["scheduler"]})
        # A run that was made longer goes on with the rates of its new length; for any other these are the saved ones.
        factor = learning_rate_factor(self.state.global_step, self.settings)
        for group, base in zip(inner.param_groups, self.lr_scheduler.base_lrs, strict=True):
            group["lr"] = base * factor
        self.lr_scheduler._last_lr = [group["lr"] for group in inner.param_groups]  # what is logged
        self.progress = saved["progress"]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Nothing to load: every micro-batch seeds the generators by its number."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Nothing to load: bfloat16 needs no loss scaling."""

    def resume_or_start(self, step: int | None) -> None:
        """Train to the last step, from the checkpoint at ``step`` or from the start.

        SIGTERM and SIGINT end the run after the current step, with a checkpoint; a second signal ends it at once.
        """
        if step is not None:
            self.state.global_step = step  # the data loader is created before the trainer's state is loaded
        with _Signals(self):
            self.train(resume_from_checkpoint=None if step is None else str(checkpoint.path_of(self.folder, step)))


class Schedule(TrainerCallback):
    """Decides when to log, validate, save and stop: every so many steps, at the end, and after a signal."""

    def __init__(self, trainer: LatteTrainer) -> None:
        self.trainer = trainer
        self.due = False  # a validation was interrupted by a signal

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        saved = self.trainer.progress.get("trainer")
        if saved is not None:
            self.trainer._tr_loss += saved["loss_since_log"]
            self.trainer._globalstep_last_logged = saved["last_logged"]
        if self.trainer.progress.pop("validation_due", False):
            self.due = True

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.due:  # not in on_train_begin: the metrics file is not open yet
            self.due = False
            self.trainer.evaluate()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        settings, step = self.trainer.settings, state.global_step
        last = step >= settings.steps
        control.should_log |= last
        control.should_evaluate = last or (settings.eval_every > 0 and step % settings.eval_every == 0)
        control.should_save = last or (settings.save_every > 0 and step % settings.save_every == 0)
        if self.trainer.stopping and not last:
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Everything was done after the last step; Trainer would repeat it.
        control.should_log = control.should_evaluate = control.should_save = False


class _Interrupted(Exception):  # noqa: N818  (never leaves this file)
    """A validation was interrupted by a signal."""


class _From(Sampler[int]):
    """Indices from ``start`` to the end; its length counts all, so that one epoch is the whole run."""

    def __init__(self, start: int, batches: Any) -> None:
        self.start, self.end = start, len(batches)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))

    def __len__(self) -> int:
        return self.end


class _Signals:
    """Records SIGTERM and SIGINT on the trainer instead of ending the process; a second signal ends it."""

    def __init__(self, trainer: LatteTrainer) -> None:
        self.trainer = trainer
        self.before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                self.before[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread: the caller handles signals
                return

    def _note(self, number: int, frame: Any) -> None:
        if self.trainer.signal_number is not None:
            self._restore()
            signal.raise_signal(number)
        self.trainer.signal_number = number

    def _restore(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def __exit__(self, *error: Any) -> None:
        self._restore()


def seed_everything(seed: int) -> None:
    """Seed the generators that initialise new weights."""
    random.seed(seed)
    torch.manual_seed(seed)
