"""Progress of a run: a live line or plain lines on the console, metrics.jsonl, TensorBoard."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from latte.extras import advice, installed
from latte.files import write_text
from latte.loading.layout import METRICS, TENSORBOARD, read_metrics

LEFT_OUT = ("epoch", "step", "total_flos", "train_loss", "train_runtime", "train_samples_per_second")


class Metrics(TrainerCallback):
    """Writes each log to metrics.jsonl and TensorBoard, and measures the time of the optimiser steps alone.

    Resuming removes the lines written after the checkpoint, so that every step is logged once.
    """

    def __init__(self, folder: Path, tokens_per_step: int, progress: Any) -> None:
        self.folder, self.tokens_per_step, self.progress = folder, tokens_per_step, progress
        self.began = 0.0
        self.window = [0, 0.0]  # steps and seconds since the last log
        self.last: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        kept = [line for line in read_metrics(self.folder) if line["step"] <= state.global_step]
        write_text(self.folder / METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        self.file = (self.folder / METRICS).open("a", encoding="utf-8")
        self.board = self._board(state.global_step + 1)
        self.totals = self.progress().setdefault("metrics", {"seconds": 0.0})

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self.began
        self.totals["seconds"] += seconds
        self.window = [self.window[0] + 1, self.window[1] + seconds]

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        values = {name: value for name, value in (logs or {}).items() if name not in LEFT_OUT}
        values = {name: value for name, value in values.items() if not name.startswith("train_")}
        self.last = values
        if not values:
            return
        if "loss" in values and self.window[0]:
            values["tokens"] = state.global_step * self.tokens_per_step
            values["tokens_per_second"] = self.tokens_per_step * self.window[0] / max(self.window[1], 1e-9)
            self.window = [0, 0.0]
        self.file.write(json.dumps({"step": state.global_step, **values}) + "\n")
        self.file.flush()
        for name, value in values.items():
            if self.board is not None:
                self.board.add_scalar(name, value, state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.board is not None:
            self.board.flush()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; also called after an error."""
        for name in ("file", "board"):
            if getattr(self, name, None) is not None:
                getattr(self, name).close()

    def _board(self, first_step: int) -> Any:
        """Where TensorBoard's files are written; None without the package, since metrics.jsonl holds the same."""
        if not installed("tensorboard"):
            print(f"no files for TensorBoard, which is not installed: {advice('tensorboard')}", file=sys.stderr)
            return None
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self.folder / TENSORBOARD), purge_step=first_step)


class Display(TrainerCallback):
    """A live line on a terminal, one line per log elsewhere."""

    def __init__(self, metrics: Metrics, console: Console, title: str) -> None:
        self.metrics, self.console, self.title = metrics, console, title
        self.live: Progress | None = None
        self.shown: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.console.is_terminal:
            self.live = Progress(
                TextColumn("[bold]{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[shown]}"),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=self.console,
            )
            self.live.start()
            self.task = self.live.add_task(self.title, total=state.max_steps, completed=state.global_step, shown="")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.live is not None:
            self.live.update(self.task, completed=state.global_step, shown=self._line())

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.shown |= self.metrics.last
        if self.live is None and self.metrics.last:
            left = self._left(state)
            self.console.print(f"step {state.global_step}/{state.max_steps}  {self._line()}{left}", highlight=False)
            self.shown = {name: value for name, value in self.shown.items() if not name.startswith("valid")}

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()

    def _line(self) -> str:
        forms = {
            "loss": "loss {:.4f}",
            "valid_loss": "valid {:.4f}",
            "valid_accuracy": "accuracy {:.1%}",
            "valid_gap_closed": "gap closed {:.1%}",
            "tokens_per_second": "{:,.0f} tokens/s",
        }
        return "  ".join(form.format(self.shown[name]) for name, form in forms.items() if name in self.shown)

    def _left(self, state: TrainerState) -> str:
        rate = self.shown.get("tokens_per_second")
        if not rate:
            return ""
        seconds = (state.max_steps - state.global_step) * self.metrics.tokens_per_step / rate
        return f"  {int(seconds) // 60}:{int(seconds) % 60:02d} left"
