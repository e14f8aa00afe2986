"""The next token of a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, TrainingArguments

from latte.data import Batch, PackedRows, Rows, prepare
from latte.data.corpus import given_tokenizer
from latte.data.tokenizer import check_fits, fingerprint, load_tokenizer
from latte.errors import UserError
from latte.loading.models import load_model, model_weights
from latte.models import LatteForCausalLM
from latte.recipe import AUTO, DataRecipe, ModelRecipe, Recipe, TrainRecipe
from latte.tasks.base import Task, config_of, dealt, inner, spaced, summed


class Language(Task):
    """Packed rows of a corpus, a causal language model, and its loss on held-out rows."""

    def __init__(self, recipe: Recipe, say: Callable[[str], None]) -> None:
        self.recipe = self.settled(recipe)
        self.corpus = prepare(self.recipe.data, say)
        self.tokenizer, self.digest = self.corpus.tokenizer, self.corpus.digest
        length = recipe.data.sequence_length
        self.rows = PackedRows(self.corpus.train, length, "training part")
        self.held_out = PackedRows(self.corpus.valid, length, "validation part")
        self.tokens_per_row = length

    @classmethod
    def settled(cls, recipe: Recipe) -> Recipe:
        return replace(recipe, data=with_tokenizer(recipe))

    @property
    def fields(self) -> dict[str, Any]:
        return {"vocab_size": len(self.tokenizer), "max_position_embeddings": self.recipe.data.sequence_length}

    @property
    def model_class(self) -> type[nn.Module]:
        return LatteForCausalLM

    def build_model(self) -> Any:
        return build_model(self.recipe.model, self.tokenizer, self.recipe.data.sequence_length)

    def evaluate(self, model: nn.Module, args: TrainingArguments, micro: int) -> dict[str, float]:
        return {"valid_loss": validation_loss(model, self.held_out, self.recipe.train, args, micro)}


def with_tokenizer(recipe: Recipe) -> DataRecipe:
    """The recipe's data settings with the tokenizer that is used: a pretrained model's own, or else the one asked for.

    Raises:
        UserError: another tokenizer than the pretrained model's was asked for, whose ids would mean other text.
    """
    data, pretrained = recipe.data, recipe.model.pretrained
    if pretrained is None:
        return replace(data, tokenizer="bpe") if data.tokenizer == AUTO else data
    folder = model_weights(pretrained).tokenizer if Path(pretrained).is_dir() else pretrained
    try:
        own = load_tokenizer(str(folder), source=folder)
    except UserError:
        if data.tokenizer in (AUTO, "bpe"):
            raise
        return data  # the model came without one: the user knows which it was trained with
    if data.tokenizer != AUTO:
        asked = None if data.tokenizer == "bpe" else given_tokenizer(data.tokenizer)
        if asked is None or fingerprint(asked) != fingerprint(own):
            raise UserError(
                f"data.tokenizer is {data.tokenizer!r}, but the model {pretrained} was trained with another tokenizer: "
                "leave data.tokenizer out"
            )
    return replace(data, tokenizer=str(folder.resolve() if isinstance(folder, Path) else folder))


def build_model(recipe: ModelRecipe, tokenizer: PreTrainedTokenizerBase, length: int) -> Any:
    """The model of a recipe, new or pretrained, with the tokenizer's vocabulary.

    Raises:
        UserError: an unknown name or setting, or a pretrained model with another vocabulary.
    """
    if recipe.pretrained is not None:
        model = load_model(recipe.pretrained)
        check_fits(tokenizer, model.config.vocab_size, recipe.pretrained)
        return model
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": length, **recipe.overrides}
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    try:
        model = AutoModelForCausalLM.from_config(config_of(recipe, **sizes, **special))
    except (ValueError, TypeError) as error:
        raise UserError(f"model: {error}") from error
    check_fits(tokenizer, model.config.vocab_size, "model.overrides.vocab_size")
    return model


def validation_loss(model: nn.Module, rows: Rows, settings: TrainRecipe, args: TrainingArguments, micro: int) -> float:
    """Mean loss per token over ``eval_rows`` rows, evenly spaced in the validation part; a collective call."""
    total = torch.zeros(2, dtype=torch.float64, device=args.device)
    for batch, counts in dealt(rows, spaced(settings.eval_rows, len(rows)), args, micro):
        items = int((batch["labels"] != -100).sum()) if counts else 0
        loss = model(**inputs_for(model, batch)).loss
        total += torch.tensor([float(loss) * items, items], dtype=torch.float64, device=args.device)
    loss_sum, count = summed(total, args)
    return float(loss_sum / count)


def inputs_for(model: nn.Module, batch: Batch) -> Batch:
    """The batch as the model's arguments: transformers' models separate segments by position ids that restart at 0."""
    if getattr(inner(model), "takes_documents", False):
        return {**batch, "use_cache": False, "return_logits": False}  # type: ignore[dict-item]
    place = torch.arange(batch["reset"].shape[1], device=batch["reset"].device)
    start = torch.where(batch["reset"], place, 0).cummax(dim=1).values
    others = {name: value for name, value in batch.items() if name != "reset"}
    return {**others, "position_ids": place - start, "use_cache": False}  # type: ignore[dict-item]
