"""Values that were stated with keys, asked for by the keys (MQAR)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TrainingArguments

from latte.data import Batch, GroupedOrder
from latte.data.arrays import cached_arrays
from latte.data.corpus import cache_folder
from latte.data.packing import IGNORE
from latte.data.recall import recall_examples
from latte.data.tokenizer import symbol_tokenizer
from latte.errors import UserError
from latte.files import digest_json
from latte.models import LatteForCausalLM
from latte.recipe import RecallRecipe, Recipe
from latte.tasks.base import Score, Task, dealt, inner, spaced, summed

VERSION = 1  # of the examples; part of the cache key
ROWS_OF_A_TEST = 64  # that are read at once


class RecallRows:
    """Examples of several settings, one after another; a batch is of one setting."""

    def __init__(self, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        self.parts = list(parts)
        self.sizes = [len(ids) for ids, _ in self.parts]

    def __len__(self) -> int:
        return sum(self.sizes)

    def batch(self, rows: Sequence[int]) -> Batch:
        """``input_ids`` and ``labels``: the label of a query stands one place behind it, as language models expect."""
        group, first = 0, 0
        while rows[0] >= first + self.sizes[group]:
            first, group = first + self.sizes[group], group + 1
        ids, labels = self.parts[group]
        chosen = [row - first for row in rows]
        shifted = np.full((len(rows), ids.shape[1]), IGNORE, np.int64)
        shifted[:, 1:] = labels[chosen][:, :-1]
        return {"input_ids": torch.from_numpy(ids[chosen].astype(np.int64)), "labels": torch.from_numpy(shifted)}

    def chosen(self, count: int) -> list[list[int]]:
        """Rows of each setting, ``count`` in all at most, evenly spaced."""
        firsts = np.cumsum([0, *self.sizes[:-1]])
        share = max(1, count // len(self.sizes))
        return [
            [int(first) + row for row in spaced(share, size)] for first, size in zip(firsts, self.sizes, strict=True)
        ]


class Recall(Task):
    """Zoology's examples, a causal language model, and its accuracy at the queries."""

    rows: RecallRows
    held_out: RecallRows

    def __init__(self, recipe: Recipe, say: Callable[[str], None]) -> None:
        self.recipe, settings = recipe, recipe.recall
        self.digest = digest_json([VERSION, asdict(settings)])
        train = examples(settings, "", recipe, say)
        self.rows = RecallRows(train)
        self.held_out = RecallRows(examples(settings, "test_", recipe, say))
        if settings.examples < recipe.train.batch_size:
            raise UserError(
                f"recall.examples is {settings.examples}, expected at least {recipe.train.batch_size}, those of a batch"
            )
        self.tokens_per_row = float(np.mean([length for length, _ in settings.settings]))
        self.tokenizer = recall_tokenizer(settings.vocab_size)
        self.chance = self.majority = 1 / (settings.vocab_size - settings.vocab_size // 2)

    def order(self, seed: int) -> GroupedOrder:
        return GroupedOrder(self.rows.sizes, seed)

    @property
    def fields(self) -> dict[str, Any]:
        settings = self.recipe.recall
        longest = max(length for length, _ in [*settings.settings, *settings.test_settings])
        return {"vocab_size": settings.vocab_size, "max_position_embeddings": longest}

    @property
    def model_class(self) -> type[nn.Module]:
        return LatteForCausalLM

    def evaluate(self, model: nn.Module, args: TrainingArguments, micro: int) -> dict[str, float]:
        found, whole = {}, torch.zeros(3, dtype=torch.float64, device=args.device)
        groups = self.held_out.chosen(self.recipe.train.eval_rows)
        for (length, pairs), rows in zip(self.recipe.recall.test_settings, groups, strict=True):
            total = torch.zeros(3, dtype=torch.float64, device=args.device)
            for batch, counts in dealt(self.held_out, rows, args, micro):
                total += answers(model, batch) * counts
            total = summed(total, args)
            found[f"valid_accuracy_{length}_{pairs}"] = float(total[1] / total[2])
            whole += total
        return {"valid_loss": float(whole[0] / whole[2]), "valid_accuracy": float(whole[1] / whole[2]), **found}

    def test(self, model: nn.Module) -> list[Score]:
        scores = []
        groups = self.held_out.chosen(len(self.held_out))
        for (length, pairs), rows in zip(self.recipe.recall.test_settings, groups, strict=True):
            parts = [rows[start : start + ROWS_OF_A_TEST] for start in range(0, len(rows), ROWS_OF_A_TEST)]
            with torch.no_grad():
                loss, right, count = sum(answers(model, self.held_out.batch(part)) for part in parts).tolist()  # type: ignore[union-attr]
            about = {"length": length, "pairs": pairs}
            scores.append(Score(f"{length}, {pairs}", right / count, loss / count, int(count), about))
        return scores

    def example(self) -> list[int]:
        ids, _ = self.held_out.parts[0]
        return [int(token) for token in ids[0]]


def answers(model: nn.Module, batch: Batch) -> Tensor:
    """Sum of the losses, right answers, and all answers of a batch. Logits are made at the queries only."""
    last = inner(model).config.num_hidden_layers - 1  # behind the last norm
    outputs = model(**batch, use_cache=False, return_logits=False, output_hidden_states=[last])
    asked = batch["labels"][:, 1:] != IGNORE
    logits = inner(model).logits(outputs.hidden_states[-1][:, :-1][asked])
    right = logits.argmax(dim=-1) == batch["labels"][:, 1:][asked]
    found = [float(outputs.loss.detach()) * right.numel(), int(right.sum()), right.numel()]
    return torch.tensor(found, dtype=torch.float64, device=right.device)


def examples(
    settings: RecallRecipe, prefix: str, recipe: Recipe, say: Callable[[str], None]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and labels of each setting of a part, made once and cached."""
    test = prefix == "test_"
    count, seed = (settings.test_examples, settings.test_seed) if test else (settings.examples, settings.seed)
    found = []
    for length, pairs in settings.test_settings if test else settings.settings:
        drawn = (settings.vocab_size, length, pairs, count, seed, settings.power)
        folder = cache_folder(recipe.data) / "recall" / digest_json([VERSION, *drawn])[:32]

        def build(drawn: Any = drawn) -> dict[str, np.ndarray]:
            ids, labels = recall_examples(*drawn)
            return {"ids": ids, "labels": labels}

        note = f"drawing {count:,} examples of {length} tokens and {pairs} pairs"
        arrays = cached_arrays(folder, build, partial(say, note))
        found.append((arrays["ids"], arrays["labels"]))
    return found


def recall_tokenizer(vocab_size: int) -> PreTrainedTokenizerBase:
    """Names of the tokens: ``.`` fills, ``k7`` is a key and ``v4100`` a value."""
    half = vocab_size // 2
    return symbol_tokenizer([".", *(f"k{key}" for key in range(1, half)), *(f"v{v}" for v in range(half, vocab_size))])
