"""What a model writes while it is trained, and what the training will take."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from latte.files import write_text
from latte.loading.layout import TRAINING_SAMPLES, read_lines
from latte.recipe import TrainRecipe

FEW, LONG = 5, 20.0  # steps to measure; seconds after which two are enough


def sample_text(model: Any, tokenizer: PreTrainedTokenizerBase, ids: list[int], new_tokens: int) -> str:
    """A continuation of ``ids`` by sampling with a fixed seed, as far as learned positions allow."""
    learned = getattr(model.config, "position_embedding", None) == "learned"
    limit = model.config.max_position_embeddings if learned else len(ids) + new_tokens
    prompt = torch.tensor([ids], device=model.device)
    torch.manual_seed(0)
    with torch.no_grad():
        written = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max(1, min(new_tokens, limit - len(ids))),
            do_sample=True,
            temperature=0.8,
            top_p=0.95,
            pad_token_id=tokenizer.eos_token_id,
        )
    return str(tokenizer.decode(written[0, len(ids) :], skip_special_tokens=True))


class Samples(TrainerCallback):
    """Writes a sample every ``sample_every`` steps to the console and to a file; it changes nothing of the training."""

    def __init__(
        self, folder: Path, model: Any, tokenizer: PreTrainedTokenizerBase, settings: TrainRecipe, console: Console
    ) -> None:
        self.path, self.model, self.tokenizer = folder / TRAINING_SAMPLES, model, tokenizer
        self.settings, self.console = settings, console
        first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        words = tokenizer(settings.sample_prompt, add_special_tokens=False, verbose=False)["input_ids"]
        self.ids: list[int] = [*([] if first is None else [first]), *words]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        kept = [line for line in read_lines(self.path) if line["step"] <= state.global_step]
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step % self.settings.sample_every:
            return
        was_training = self.model.training
        self.model.eval()
        text = sample_text(self.model, self.tokenizer, self.ids, self.settings.sample_tokens)
        self.model.train(was_training)
        line = {"step": state.global_step, "prompt": self.settings.sample_prompt, "text": text}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        shown = Text.assemble(
            (f"step {state.global_step} writes: ", "bold"), (self.settings.sample_prompt, "dim"), text
        )
        self.console.print(shown, soft_wrap=True, highlight=False)


class Forecast(TrainerCallback):
    """Says once, after a few measured steps, how long the training will take and how much memory it takes."""

    def __init__(self, console: Console, peak_memory: Callable[[], int]) -> None:
        self.console, self.peak_memory = console, peak_memory
        self.seconds: list[float] = []
        self.began = 0.0
        self.said = False

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.began = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        measured = self.seconds[1:]  # the first step also allocates and warms up
        if self.said or not (len(measured) >= FEW or (len(measured) > 1 and sum(measured) > LONG)):
            return
        self.said = True
        left = state.max_steps - state.global_step
        if left:
            each = sorted(measured)[len(measured) // 2]
            self.console.print(
                f"about {duration(left * each)} for the {left:,} steps left, at {each:.3g} s a step and without "
                f"validations; {self.peak_memory() / 2**20:,.0f} MiB of memory",
                soft_wrap=True,
                highlight=False,
            )


def duration(seconds: float) -> str:
    """Seconds, minutes, or hours and minutes, as a person would say it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
