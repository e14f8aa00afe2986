"""One model's row of a comparison: quality by context, speed of training and decoding, memory, size of state."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from latte.eval.decode_timing import engine_of, random_ids, read_context, time_tokens
from latte.eval.generate import Reader, stream_text
from latte.eval.run import default_contexts, read_text
from latte.eval.stream import evaluate, longest_context, state_bytes
from latte.files import write_text
from latte.loading import load
from latte.loading.layout import EVAL, RESULT, SAMPLES
from latte.recipe import CompareRecipe, EvalRecipe, GenerateRecipe, Recipe


@dataclass(frozen=True)
class Row:
    """One model's row of the comparison."""

    name: str
    parameters: int
    tokens: int
    valid_loss: float
    perplexity: float  # at the training length
    bits_per_byte: float
    train_tokens_per_second: float
    peak_memory_bytes: int
    decode_tokens_per_second: float
    state_bytes: int  # after decode_context tokens, one row
    contexts: list[dict[str, Any]]  # of the same tokens at every length
    positions: list[dict[str, Any]]
    trained_context: int = 0
    unreached: list[int] = field(default_factory=list)  # contexts that no document has: not measured
    decode_engine: str = ""  # "kernel": one native call a token; "modules": torch, layer by layer

    @property
    def at_training(self) -> dict[str, Any]:
        """The figures at the training length, on the same tokens as those of all other lengths."""
        return next(entry for entry in self.contexts if entry["context"] == self.trained_context)


def measure(name: str, settings: Recipe, recipe: CompareRecipe) -> Row:
    """Evaluate a run's final model at all contexts, time its decoding, and write a sample to the run's folder."""
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
    speed, size, engine = decode_speed(model, context, recipe.decode_tokens)
    return Row(
        name=name,
        parameters=result["parameters"],
        tokens=result["tokens"],
        valid_loss=result["valid_loss"],
        perplexity=at_training.perplexity,
        bits_per_byte=at_training.bits_per_byte,
        train_tokens_per_second=result["tokens_per_second"],
        peak_memory_bytes=result["peak_memory_bytes"],
        decode_tokens_per_second=speed,
        state_bytes=size,
        contexts=[asdict(entry) for entry in quality.contexts],
        positions=[asdict(entry) for entry in quality.positions],
        trained_context=trained,
        unreached=quality.unreached,
        decode_engine=engine,
    )


def decode_speed(model: Any, context: int, tokens: int) -> tuple[float, int, str]:
    """Tokens per second of one row over the last ``tokens`` of a context, the bytes of its state, and what decoded."""
    tokens = min(tokens, context - 1)
    ids = random_ids(model, context)
    cache = read_context(model, ids[:, : context - tokens], chunk=512)
    seconds, cache = time_tokens(model, cache, ids[:, context - tokens :])
    return tokens / max(sum(seconds), 1e-9), state_bytes(cache), engine_of(cache)


def _sample(folder: Path, model: Any, tokenizer: Any, recipe: CompareRecipe) -> None:
    reader = Reader(model, tokenizer)
    reader.read_blocks(iter([recipe.sample_prompt]))
    limit = longest_context(model)
    count = recipe.sample_tokens if limit is None else min(recipe.sample_tokens, limit - reader.count)
    text = "".join(stream_text(reader, GenerateRecipe(max_new_tokens=max(0, count))))
    write_text(folder / SAMPLES, json.dumps([{"prompt": recipe.sample_prompt, "text": text}], indent=1) + "\n")
