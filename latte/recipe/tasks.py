"""Settings of tasks other than language modelling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from latte.errors import UserError
from latte.recipe.bounds import check_numbers

#: What a model is trained to do. ``language``: the next token of a text; ``recall``: values that were stated with keys
#: (MQAR); ``classify``: the class of a text, an image or a pair of texts.
TaskName = Literal["language", "recall", "classify"]
#: Classes of the kinds that have a fixed number.
CLASSES = {"listops": 10, "image": 10, "pathfinder": 2}


@dataclass
class RecallRecipe:
    """Multi-query associative recall (MQAR): keys with values, then some of the keys again; the values are asked for.

    The examples are those of Zoology's generator with the same seeds.
    """

    lengths: list[int] = field(default_factory=lambda: [64, 128, 256])
    """Tokens of the training examples; each batch has one length, and all lengths are mixed."""
    pairs: list[int] = field(default_factory=lambda: [4, 8, 16])
    """Pairs of key and value in the examples of each length."""
    test_lengths: list[int] = field(default_factory=list)
    """Tokens of the test examples; by default those of training."""
    test_pairs: list[int] = field(default_factory=list)
    """Pairs in the test examples of each length."""
    vocab_size: int = 8192
    """Tokens: 0 fills, the lower half are keys, the upper half values."""
    examples: int = 100_000
    """Training examples of each length."""
    test_examples: int = 3000
    """Test examples of each length; train.eval_rows of them are read in a validation."""
    seed: int = 0
    """Seed of the training examples."""
    test_seed: int = 10
    """Seed of the test examples."""
    power: float = 0.01
    """Exponent of the distances between a pair and its query: the n-th nearest place has a weight of n^(power - 1)."""

    def __post_init__(self) -> None:
        check_numbers(self, {"examples": 1, "test_examples": 1, "vocab_size": 4}, "recall.")
        if not self.lengths:
            raise UserError("recall.lengths is empty, expected at least one length")
        for prefix, settings in (("", self.settings), ("test_", self.test_settings)):
            for length, pairs in settings:
                _check_recall(prefix, length, pairs, self.vocab_size)

    @property
    def settings(self) -> list[tuple[int, int]]:
        """Length and number of pairs of the training examples."""
        return _zipped("", self.lengths, self.pairs)

    @property
    def test_settings(self) -> list[tuple[int, int]]:
        """The same of the test examples."""
        if not self.test_lengths and not self.test_pairs:
            return self.settings
        return _zipped("test_", self.test_lengths, self.test_pairs)


@dataclass
class ClassifyRecipe:
    """Examples with labels: generated, or from files."""

    kind: Literal["text", "pairs", "image", "listops", "pathfinder"] = "text"
    """text (JSON lines with a text and a label), pairs (label, id, id, text, text with tabs between them, as AAN's),
    image (CIFAR-10 in grey: a folder, or hf:NAME), listops or pathfinder (generated). The files are data.source."""
    classes: int | None = None
    """Number of classes, labelled from 0; the default is 2 for text and pairs."""
    label_field: str = "label"
    """Field of a JSON line that has the label; the text is in data.text_field."""
    test_source: str | None = None
    """Test examples of the same form; by default the validation examples, and for images the test part."""
    examples: int | None = None
    """Training examples; of generated ones by default 96,000 (listops) or 160,000 (pathfinder), of files all."""
    valid_examples: int = 2000
    """Validation examples, taken from the training part unless data.valid_source has them."""
    test_examples: int | None = None
    """Test examples; of generated ones by default as many as validation examples, of files all."""
    seed: int = 0
    """Seed of generated examples, and of the choice of validation examples."""
    size: int = 32
    """Width of the images of pathfinder: 32 or 128."""

    def __post_init__(self) -> None:
        check_numbers(self, {"classes": 2, "examples": 1, "valid_examples": 1, "test_examples": 1}, "classify.")
        fixed = CLASSES.get(self.kind)
        if fixed is not None and self.classes not in (None, fixed):
            raise UserError(f"classify.classes is {self.classes}, expected {fixed} for {self.kind}")
        if self.size not in (32, 128):
            raise UserError(f"classify.size is {self.size}, expected 32 or 128")

    @property
    def num_classes(self) -> int:
        return self.classes or CLASSES.get(self.kind, 2)


def _zipped(prefix: str, lengths: list[int], pairs: list[int]) -> list[tuple[int, int]]:
    if len(lengths) != len(pairs):
        raise UserError(
            f"recall.{prefix}pairs has {len(pairs)} entries, expected {len(lengths)}: one for each of "
            f"recall.{prefix}lengths"
        )
    found = list(zip(lengths, pairs, strict=True))
    if len(set(found)) != len(found):
        raise UserError(f"recall.{prefix}lengths and {prefix}pairs have a setting twice, expected different ones")
    return found


def _check_recall(prefix: str, length: int, pairs: int, vocab_size: int) -> None:
    if length % 2 or length < 4 * pairs:
        raise UserError(
            f"recall.{prefix}lengths has {length} with {pairs} pairs, expected an even number of at least {4 * pairs}: "
            "pairs take two tokens each, and queries as many"
        )
    if vocab_size <= length:
        raise UserError(f"recall.vocab_size is {vocab_size}, expected more than {length}, the tokens of an example")
    if pairs > vocab_size // 2 - 1:
        raise UserError(f"recall.vocab_size is {vocab_size}, expected keys for {pairs} pairs in its lower half")
