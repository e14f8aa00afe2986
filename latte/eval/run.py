"""``latte eval``: a model by folder or name, on its run's validation text or any other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from latte.data import open_source, prepare
from latte.data.tokenizer import encode_documents
from latte.errors import UserError
from latte.eval.stream import Evaluation, Text, evaluate, longest_context
from latte.files import require_file_place, write_text
from latte.loading import load_any
from latte.loading.layout import read_extension, read_recipe
from latte.loading.weights import to_stderr
from latte.recipe import DataRecipe, EvalRecipe


def run_eval(recipe: EvalRecipe, on_tokens: Any = lambda count: None) -> tuple[Evaluation, Text]:
    """Evaluate as the recipe says, and write the figures to its ``out`` if it has one.

    Raises:
        UserError: a model, text or context that can't be used.
    """
    if recipe.out is not None:
        require_file_place(Path(recipe.out))
    model, tokenizer = load_any(recipe.model, tokenizer_name=recipe.tokenizer, weights=recipe.weights)
    text = read_text(recipe, tokenizer)
    contexts = recipe.contexts or default_contexts(recipe, model, text)
    result = evaluate(model, text, contexts, on_tokens=on_tokens)
    if recipe.out is not None:
        Path(recipe.out).parent.mkdir(parents=True, exist_ok=True)
        about = {"model": recipe.model, "source": recipe.source, "documents": len(text.documents)}
        write_text(Path(recipe.out), json.dumps({**about, **asdict(result)}, indent=1) + "\n")
    return result, text


def read_text(recipe: EvalRecipe, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The documents of a recipe's source, or of the run's validation part, up to ``max_tokens``."""
    if recipe.source is not None:
        settings = DataRecipe(
            source=recipe.source,
            format=recipe.format,
            text_field=recipe.text_field,
            separator=recipe.separator,
            encoding=recipe.encoding,
        )
        source = open_source(recipe.source, settings)
        text = take(_encoded(tokenizer, source.documents()), tokenizer, recipe)
        for note in source.notes():
            to_stderr(note.replace("data.encoding", "--encoding"))
        return text
    run = read_recipe(recipe.model)
    if run is not None:
        return take(prepare(run.data).valid.documents(), tokenizer, recipe)
    extension = read_extension(recipe.model)
    if extension is None:
        raise UserError(f"{recipe.model} is not a run's folder, so it has no validation text of its own: give --source")
    return take(prepare(extension.data, tokenizer=tokenizer).valid.documents(), tokenizer, recipe)


def take(pairs: Iterable[tuple[np.ndarray, int]], tokenizer: PreTrainedTokenizerBase, recipe: EvalRecipe) -> Text:
    """Documents of at least ``min_document_tokens``, cut to ``max_document_tokens``, up to ``max_tokens`` in all."""
    documents: list[np.ndarray] = []
    left, num_bytes = recipe.max_tokens, 0
    for ids, size in pairs:
        if len(ids) < recipe.min_document_tokens:
            continue
        room = min(left, recipe.max_document_tokens or left)
        if len(ids) > room:
            ids = ids[:room]
            size = len(str(tokenizer.decode(ids, skip_special_tokens=True)).encode("utf-8"))
        documents.append(ids)
        num_bytes += size
        left -= len(ids)
        if left < 2:
            break
    if recipe.join_documents and documents:
        documents = [np.concatenate(documents)]
    return Text(documents, num_bytes)


def default_contexts(recipe: EvalRecipe, model: Any, text: Text) -> list[int]:
    """A quarter of the training length to eight times it, as far as the model's positions and the documents allow."""
    run, extension = read_recipe(recipe.model), read_extension(recipe.model)
    trained = 512 if run is None else run.data.sequence_length
    if extension is not None:
        trained = max((stage.sequence_length for stage in extension.stages().values()), default=trained)
    limit = min(longest_context(model) or text.longest, text.longest)
    lengths = [max(1, trained // 4), max(1, trained // 2), trained, 2 * trained, 4 * trained, 8 * trained]
    return [length for length in lengths if length <= limit] or [max(1, limit)]


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Iterator[tuple[np.ndarray, int]]:
    for text in texts:
        yield encode_documents(tokenizer, [text])[0], len(text.encode("utf-8", "replace"))
