"""What a training run asks of its task: data, model, metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TrainingArguments

from latte.data import Batch, GroupedOrder, Order, Rows
from latte.errors import UserError
from latte.models import LatteConfig, preset
from latte.recipe import ModelRecipe, Recipe


@dataclass(frozen=True)
class Score:
    """Accuracy on one group of test examples."""

    group: str  # such as "64 tokens, 4 pairs"; empty if there is one group alone
    accuracy: float
    loss: float
    count: int  # answers that were scored
    about: dict[str, Any] = field(default_factory=dict)  # what a table is made from, such as the length

    @property
    def standard_error(self) -> float:
        return float((self.accuracy * (1 - self.accuracy) / max(1, self.count)) ** 0.5)


class Task(ABC):
    """A task with its data: batches to train on, a model for them, and what it is worth.

    The trainer knows no task: it gets batches, a model whose forward makes the loss, and ``evaluate``.
    """

    recipe: Recipe  # with every setting as it is used
    digest: str  # of the data
    tokenizer: PreTrainedTokenizerBase
    rows: Rows
    held_out: Rows  # validation, while training
    tokens_per_row: float  # the mean, where rows differ
    #: Accuracy of guessing, and of the answer that is right most often; None where accuracy is not measured.
    chance: float | None = None
    majority: float | None = None

    @classmethod
    def settled(cls, recipe: Recipe) -> Recipe:
        """The recipe as a run's folder records it."""
        return recipe

    def order(self, seed: int) -> Order | GroupedOrder:
        """Which rows a step has."""
        return Order(len(self.rows), seed)

    @property
    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """Fields of the model's configuration that the data determine."""

    @property
    @abstractmethod
    def model_class(self) -> type[nn.Module]:
        """The model with its head, made from a configuration."""

    def build_model(self) -> Any:
        """A new model as the recipe says; the caller has seeded the generators.

        Raises:
            UserError: an unknown name or setting.
        """
        recipe = self.recipe.model
        refuse_pretrained(self.recipe)
        try:
            return self.model_class(config_of(recipe, **{**self.fields, **recipe.overrides}))
        except (ValueError, TypeError) as error:
            raise UserError(f"model: {error}") from error

    @abstractmethod
    def evaluate(self, model: nn.Module, args: TrainingArguments, micro: int) -> dict[str, float]:
        """Metrics of the model as it is; a collective call."""

    def test(self, model: nn.Module) -> list[Score]:
        """Scores on all test examples, in one process; empty where accuracy is not measured."""
        return []

    def example(self) -> list[int]:
        """Tokens to look at a model with; empty if there are none to show."""
        return []


def refuse_pretrained(recipe: Recipe) -> None:
    """Raise UserError where new weights are needed."""
    if recipe.model.pretrained is not None:
        raise UserError(
            f"model.pretrained is {recipe.model.pretrained!r}, expected none: task {recipe.task} trains a new model"
        )


def config_of(recipe: ModelRecipe, **settings: Any) -> LatteConfig:
    """The configuration of a recipe's model.

    Raises:
        UserError: an unknown name or setting.
    """
    try:
        return preset(recipe.variant, recipe.size, **{**recipe.overrides, **settings})
    except (ValueError, TypeError) as error:
        raise UserError(f"model: {error}") from error


def spaced(count: int, total: int) -> list[int]:
    """``count`` numbers below ``total``, evenly spaced; all of them if there are fewer."""
    count = min(count, total)
    return [index * total // count for index in range(count)]


def dealt(rows: Rows, chosen: Sequence[int], args: TrainingArguments, micro: int) -> Iterator[tuple[Batch, bool]]:
    """Batches of this process, on its device, and whether each counts.

    Every process calls the model equally often, since a sharded model communicates in each call; where a process has no
    rows left, its batch is a repetition that does not count.
    """
    per_call = micro * args.world_size
    for start in range(0, len(chosen), per_call):
        mine = chosen[start : start + per_call][args.process_index :: args.world_size]
        batch = rows.batch(mine or chosen[:1])
        yield {name: value.to(args.device) for name, value in batch.items()}, bool(mine)


def summed(total: Tensor, args: TrainingArguments) -> Tensor:
    """The sum over all processes."""
    if args.world_size > 1:
        torch.distributed.all_reduce(total)
    return total


def inner(model: nn.Module) -> Any:
    """The model itself, without the wrapper of a distributed one."""
    return getattr(model, "module", model)
