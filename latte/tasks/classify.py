"""The class of a text, an image or a pair of texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, TrainingArguments

from latte.data import Batch
from latte.data.arrays import Arrays, cached_arrays
from latte.data.cifar import cifar, cifar_digest
from latte.data.corpus import cache_folder
from latte.data.examples import ExampleRows, Examples, check_labels
from latte.data.generated import generated
from latte.data.labelled import labelled_pairs, labelled_texts, source_digest
from latte.data.listops import SYMBOLS
from latte.data.packing import permutation
from latte.data.tokenizer import byte_tokenizer, symbol_tokenizer
from latte.errors import UserError
from latte.files import digest_json
from latte.mixers import mixer_class
from latte.models import LatteForSequenceClassification
from latte.recipe import Recipe
from latte.tasks.base import Score, Task, config_of, dealt, spaced, summed

VERSION = 1  # of the examples; part of the cache key
GENERATED = ("listops", "pathfinder")
EXAMPLES = {"listops": 96_000, "pathfinder": 160_000}
ROWS_OF_A_TEST = 32  # that are read at once
Parts = dict[str, Examples]


class Classify(Task):
    """Examples with labels, a bidirectional encoder with a classifier, and its accuracy."""

    rows: ExampleRows
    held_out: ExampleRows

    def __init__(self, recipe: Recipe, say: Callable[[str], None]) -> None:
        self.recipe, self.classes = recipe, recipe.classify.num_classes
        if recipe.train.sample_every:
            raise UserError("train.sample_every is set, expected 0 with task classify: a classifier writes no text")
        self.digest = digest_json([VERSION, _without_places(recipe), _sources(recipe)])
        folder = cache_folder(recipe.data) / "classify" / self.digest[:32]
        parts = _open_parts(cached_arrays(folder, lambda: _arrays(read_parts(recipe, say))))
        for part, examples in parts.items():
            check_labels(np.asarray(examples.labels), self.classes, f"the {part} part", every=part == "train")
        length = recipe.data.sequence_length
        self.rows, self.held_out = ExampleRows(parts["train"], length), ExampleRows(parts["valid"], length)
        self.test_rows = ExampleRows(parts["test"], length)
        if len(self.rows) < recipe.train.batch_size:
            raise UserError(
                f"there are {len(self.rows)} training examples, expected at least {recipe.train.batch_size}, one batch"
            )
        lengths = np.minimum(np.diff(parts["train"].starts), length)
        self.tokens_per_row = float(lengths.mean()) * (2 if parts["train"].pair_ids is not None else 1)
        self.tokenizer = _tokenizer(recipe.classify.kind)
        self.chance = 1 / self.classes
        self.majority = float(np.bincount(np.asarray(parts["test"].labels)).max() / len(parts["test"]))

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "vocab_size": len(self.tokenizer),
            "max_position_embeddings": self.recipe.data.sequence_length,
            "num_labels": self.classes,
            "bidirectional": True,
            "two_towers": self.rows.examples.pair_ids is not None,
        }

    @property
    def model_class(self) -> type[nn.Module]:
        return LatteForSequenceClassification

    def build_model(self) -> Any:
        for name in config_of(self.recipe.model).mixer_names():
            if "bidirectional" not in mixer_class(name).directions:
                raise UserError(
                    f"model.variant is {self.recipe.model.variant!r}, whose mixer {name!r} reads only forwards"
                )
        return super().build_model()

    def evaluate(self, model: nn.Module, args: TrainingArguments, micro: int) -> dict[str, float]:
        total = torch.zeros(2, dtype=torch.float64, device=args.device)
        confusion = torch.zeros(self.classes, self.classes, dtype=torch.float64, device=args.device)
        rows = spaced(self.recipe.train.eval_rows, len(self.held_out))
        for batch, counts in dealt(self.held_out, rows, args, micro):
            loss, found = verdicts(model, batch, self.classes)
            total += torch.stack([loss, loss.new_tensor(len(batch["labels"]))]) * counts
            confusion += found * counts
        loss_sum, count = summed(total, args)
        confusion = summed(confusion, args)
        return {"valid_loss": float(loss_sum / count), "valid_accuracy": float(confusion.trace() / count)}

    def test(self, model: nn.Module) -> list[Score]:
        confusion, loss = torch.zeros(self.classes, self.classes, dtype=torch.float64), 0.0
        device = next(model.parameters()).device
        with torch.no_grad():
            for start in range(0, len(self.test_rows), ROWS_OF_A_TEST):
                rows = range(start, min(start + ROWS_OF_A_TEST, len(self.test_rows)))
                batch = {name: value.to(device) for name, value in self.test_rows.batch(rows).items()}
                more, found = verdicts(model, batch, self.classes)
                loss, confusion = loss + float(more), confusion + found.cpu()
        count = len(self.test_rows)
        about = {"confusion": confusion.long().tolist()}
        return [Score("", float(confusion.trace() / count), loss / count, count, about)]

    def example(self) -> list[int]:
        if self.rows.examples.pair_ids is not None:
            return []  # the inspector shows one document
        return [int(token) for token in self.held_out.examples.tokens(0)[: self.held_out.length]]


def verdicts(model: nn.Module, batch: Batch, classes: int) -> tuple[Tensor, Tensor]:
    """Sum of the losses, and how often examples of each class (rows) were taken for each (columns)."""
    outputs = model(**batch)
    labels, taken = batch["labels"], outputs.logits.argmax(dim=-1)
    counts = torch.bincount(labels * classes + taken, minlength=classes * classes)
    return outputs.loss.detach().double() * len(labels), counts.view(classes, classes).double()


def read_parts(recipe: Recipe, say: Callable[[str], None]) -> Parts:
    """Training, validation and test examples.

    Raises:
        UserError: files that can't be used, or too few examples to divide.
    """
    settings, data = recipe.classify, recipe.data
    valid, test = settings.valid_examples, settings.test_examples
    if settings.kind in GENERATED:
        train, test = settings.examples or EXAMPLES[settings.kind], test or valid
        whole = generated(settings.kind, train + valid + test, settings.seed, settings.size, say)
        firsts = np.cumsum([0, train, valid, test])
        parts = zip(("train", "valid", "test"), firsts[:-1], firsts[1:], strict=True)
        return {part: whole.select(range(first, last)) for part, first, last in parts}
    say(f"reading {data.source}")
    found = {"train": _read(recipe, data.source, "train")}
    if settings.kind == "image":
        found["test"] = _read(recipe, data.source, "test")
    elif settings.test_source is not None:
        found["test"] = _read(recipe, settings.test_source, "test")
    for part, examples in found.items():
        where = data.source if part == "train" else settings.test_source or data.source
        check_labels(examples.labels, settings.num_classes, where, every=part == "train")
    order = permutation(len(found["train"]), settings.seed, 0)
    if data.valid_source is not None:
        found["valid"] = _read(recipe, data.valid_source, "train")
    else:
        if len(order) <= valid:
            raise UserError(
                f"classify.valid_examples is {valid}, expected fewer than the {len(order)} examples of {data.source}"
            )
        # The last ones of CIFAR, as the Long Range Arena has it; of texts, which are sorted by class, any.
        order = np.arange(len(order)) if settings.kind == "image" else order
        found["valid"] = found["train"].select(order[-valid:])
        order = order[:-valid]
    found["train"] = found["train"].select(order[: settings.examples])
    found.setdefault("test", found["valid"])
    if test is not None and test < len(found["test"]):
        chosen = permutation(len(found["test"]), settings.seed, 1)[:test]
        found["test"] = found["test"].select(chosen)
    return found


def _arrays(parts: Parts) -> Arrays:
    return {f"{part}.{name}": values for part, examples in parts.items() for name, values in examples.arrays().items()}


def _open_parts(arrays: Arrays) -> Parts:
    found: dict[str, Arrays] = {"train": {}, "valid": {}, "test": {}}
    for name, values in arrays.items():
        part, _, own = name.partition(".")
        found[part][own] = values
    return {part: Examples(**own) for part, own in found.items()}


def _read(recipe: Recipe, source: str, part: str) -> Examples:
    settings, data = recipe.classify, recipe.data
    if settings.kind == "image":
        return cifar(source, part)
    if settings.kind == "pairs":
        return labelled_pairs(source, data.sequence_length)
    return labelled_texts(source, data.text_field, settings.label_field, data.sequence_length)


def _sources(recipe: Recipe) -> list[str]:
    """Digests of all files.

    Raises:
        UserError: one is missing.
    """
    settings, data = recipe.classify, recipe.data
    if settings.kind in GENERATED:
        return []
    if settings.kind == "image":
        return [cifar_digest(data.source)]
    if data.source == "python-stdlib":
        raise UserError("data.source is python-stdlib, expected a file of texts with labels")
    return [source_digest(path) for path in (data.source, data.valid_source, settings.test_source) if path is not None]


def _without_places(recipe: Recipe) -> dict[str, Any]:
    """All that the examples depend on but the files, which are known by their digests."""
    settings = {name: value for name, value in asdict(recipe.classify).items() if name != "test_source"}
    given = [recipe.data.valid_source is not None, recipe.classify.test_source is not None]
    generated_here = recipe.classify.kind in GENERATED
    text = [] if generated_here else [recipe.data.text_field, recipe.data.sequence_length]
    return {**settings, "given": given, "text": text}


def _tokenizer(kind: str) -> PreTrainedTokenizerBase:
    if kind == "listops":
        return symbol_tokenizer(SYMBOLS)
    return byte_tokenizer() if kind in ("text", "pairs") else symbol_tokenizer([str(pixel) for pixel in range(256)])
