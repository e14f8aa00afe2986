"""The closed part of the gap between window attention and the pretrained model, on validation rows during training:

(loss on window and sinks - loss now) / (loss on window and sinks - loss of the pretrained model)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from latte.data import Batch
from latte.extend.layer import CLOSED
from latte.extend.low_rank import without_low_rank
from latte.extend.model import LatteExtendedForCausalLM
from latte.models.loss import next_token_loss

SMALLEST = 0.01  # nats; a part of a smaller gap is noise


class Gap:
    """The gap on some rows; its two ends are measured on first use."""

    def __init__(self, rows: list[Batch]) -> None:
        self.rows = rows
        self._ends: tuple[float, float] | None = None

    def closed(self, model: LatteExtendedForCausalLM, loss: float) -> float | None:
        """The part of the gap that a loss on these rows closes; None if the gap is smaller than SMALLEST."""
        if self._ends is None:
            with without_low_rank(model):
                self._ends = (self.loss(model, mode="original"), self.loss(model, closed=True))
        best, worst = self._ends
        return (worst - loss) / (worst - best) if worst - best > SMALLEST else None

    @torch.no_grad()
    def loss(
        self, model: LatteExtendedForCausalLM, mode: str = "extended", closed: bool = False, alone: int | None = None
    ) -> float:
        """Mean next-token loss over the rows; ``alone``: of the model with one layer replaced."""
        total = 0.0
        with _closed(model) if closed else nullcontext():
            for row in self.rows:
                hidden_BTD, reading = model.read_as(mode, row["input_ids"], reset=row["reset"], alone=alone)
                loss = next_token_loss(
                    hidden_BTD,
                    model.get_output_embeddings(),
                    row["labels"],
                    tokens=reading.tokens,
                    finish=model.finish_logits,
                )
                total += float(loss)
        return total / len(self.rows)


@contextmanager
def _closed(model: LatteExtendedForCausalLM) -> Iterator[None]:
    """Close the latents and drop the kept tokens: the model attends to its window and sinks alone."""
    windows = [mixer.pretrained for mixer in model.mixers]
    sizes = [window.kept for window in windows]
    biases = [mixer.slot0_bias for mixer in model.mixers if mixer.slot0_bias is not None]
    values: list[Tensor] = [bias.detach().clone() for bias in biases]
    close_latents(model)
    for window in windows:
        window.kept = 0
    try:
        yield
    finally:
        with torch.no_grad():
            for bias, value in zip(biases, values, strict=True):
                bias.copy_(value)
        for window, size in zip(windows, sizes, strict=True):
            window.kept = size


@torch.no_grad()
def close_latents(model: LatteExtendedForCausalLM) -> None:
    """Give the latents a weight of exactly 0."""
    for mixer in model.mixers:
        if mixer.slot0_bias is not None:
            mixer.slot0_bias.fill_(CLOSED)
