"""One model's row of a comparison: quality by context, memory and size of state; speeds are filled in by eval.speed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from latte.eval.decode_timing import random_ids, read_context
from latte.eval.generate import Reader, stream_text
from latte.eval.run import default_contexts, read_text
from latte.eval.stream import evaluate, longest_context, state_bytes
from latte.files import write_text
from latte.loading import load
from latte.loading.layout import EVAL, RESULT, SAMPLES
from latte.recipe import CompareRecipe, EvalRecipe, GenerateRecipe, Recipe

#: Fields of a configuration that bring models to the same number of parameters.
SIZES = ("hidden_size", "num_hidden_layers", "intermediate_size")


@dataclass(frozen=True)
class Row:
    """One model's row of the comparison."""

    name: str
    parameters: int
    tokens: int
    valid_loss: float
    perplexity: float  # at the training length
    bits_per_byte: float
    peak_memory_bytes: int
    state_bytes: int  # after decode_context tokens, one row
    contexts: list[dict[str, Any]]  # of the same tokens at every length
    positions: list[dict[str, Any]]
    trained_context: int = 0
    unreached: list[int] = field(default_factory=list)  # contexts that no document has: not measured
    learning_rate: float = 0.0
    searched: list[list[float | None]] = field(default_factory=list)  # rates that were tried, each with its loss
    sizes: dict[str, int] = field(default_factory=dict)  # where they are not the preset's
    train_tokens_per_second: float | None = None  # this and the rest: see eval.speed.Speed
    decode_tokens_per_second: float | None = None
    decode_engine: str = ""
    module_tokens_per_second: float | None = None
    load_average: float | None = None  # of the machine when the timing began

    @property
    def at_training(self) -> dict[str, Any]:
        """The figures at the training length, on the same tokens as those of all other lengths."""
        return next(entry for entry in self.contexts if entry["context"] == self.trained_context)

    @property
    def at_longest(self) -> dict[str, Any]:
        return self.contexts[-1]

    @property
    def rate_at_edge(self) -> bool:
        """Whether the lowest or the highest of the tried learning rates was best: one beyond might be better."""
        return bool(self.searched) and self.learning_rate in (self.searched[0][0], self.searched[-1][0])


def measure(
    name: str, settings: Recipe, recipe: CompareRecipe, searched: Sequence[tuple[float, float | None]] = ()
) -> Row:
    """Evaluate a run's final model at all contexts, weigh its state, and write a sample to the run's folder."""
    model, tokenizer = load(settings.out)
    asked = EvalRecipe(
        model=settings.out,
        max_tokens=recipe.eval_tokens,
        min_document_tokens=recipe.min_document_tokens,
        join_documents=recipe.join_documents,
    )
    limit = longest_context(model)
    text = read_text(asked, tokenizer)
    contexts = recipe.eval_contexts or default_contexts(asked, model, text)
    trained = min(settings.data.sequence_length, text.longest)  # where documents are shorter, they were read whole
    contexts = [context for context in {*contexts, trained} if limit is None or context <= limit]
    quality = evaluate(model, text, contexts)
    folder = Path(settings.out)
    write_text(folder / EVAL, json.dumps({"model": settings.out, **asdict(quality)}, indent=1) + "\n")
    if recipe.sample_tokens:
        _sample(folder, model, tokenizer, recipe)
    at_training = next(entry for entry in quality.contexts if entry.context == trained)
    result = json.loads((folder / RESULT).read_text())
    context = min(recipe.decode_context, limit or recipe.decode_context)
    cache = read_context(model, random_ids(model, context), chunk=512)
    return Row(
        name=name,
        parameters=result["parameters"],
        tokens=result["tokens"],
        valid_loss=result["valid_loss"],
        perplexity=at_training.perplexity,
        bits_per_byte=at_training.bits_per_byte,
        peak_memory_bytes=result["peak_memory_bytes"],
        state_bytes=state_bytes(cache),
        contexts=[asdict(entry) for entry in quality.contexts],
        positions=[asdict(entry) for entry in quality.positions],
        trained_context=trained,
        unreached=quality.unreached,
        learning_rate=settings.train.learning_rate,
        searched=[list(pair) for pair in searched],
        sizes={name: settings.model.overrides[name] for name in SIZES if name in settings.model.overrides},
    )


def _sample(folder: Path, model: Any, tokenizer: Any, recipe: CompareRecipe) -> None:
    reader = Reader(model, tokenizer)
    reader.read_blocks(iter([recipe.sample_prompt]))
    limit = longest_context(model)
    count = recipe.sample_tokens if limit is None else min(recipe.sample_tokens, limit - reader.count)
    text = "".join(stream_text(reader, GenerateRecipe(max_new_tokens=max(0, count))))
    write_text(folder / SAMPLES, json.dumps([{"prompt": recipe.sample_prompt, "text": text}], indent=1) + "\n")
