"""``latte generate``: continue a prompt of any length in constant memory."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import IO

from latte.cli.outcome import Outcome
from latte.cli.settings import parse
from latte.cli.texts import note_undecodable, open_text, reading_bar, show
from latte.recipe import GenerateRecipe

NEEDS = "latte.eval.run"
DESCRIPTION = """Continue a text, showing it as it comes: `latte generate MODEL --prompt "def main"`. A prompt file may
have any length: only the model's state is kept. --save_state keeps that state and --load_state goes on from it, so that
a long document is read once and asked many times. --prompts_file continues many prompts together."""
EXAMPLE = "latte generate runs/mine --prompt 'def main'"


def read(arguments: Sequence[str]) -> Callable[[], Outcome]:
    return partial(run, parse("generate", DESCRIPTION, GenerateRecipe, arguments, positional="model", example=EXAMPLE))


def run(recipe: GenerateRecipe) -> Outcome:
    """Read, perhaps save, and write to standard output."""
    if recipe.prompts_file is not None:
        return run_many(recipe, Path(recipe.prompts_file))
    from latte.eval.generate import Reader, stream_text, text_blocks
    from latte.loading import load_any

    with _prompt(recipe) as (file, size):
        model, tokenizer = load_any(recipe.model, weights=recipe.weights)
        reader = Reader(model, tokenizer, recipe.chunk)
        if recipe.load_state is not None:
            reader.load(Path(recipe.load_state))
        if file is not None or recipe.load_state is None:
            with reading_bar(size) as on_bytes:
                note = partial(note_undecodable, recipe.prompt_file or "the prompt")
                reader.read_blocks(text_blocks(file or io.BytesIO(), on_bytes, note))
    if recipe.save_state is not None:
        reader.save(Path(recipe.save_state))
    read, pieces = reader.count, []
    for piece in stream_text(reader, recipe):
        pieces.append(piece)
        show(piece)
    sys.stdout.write("\n" if recipe.max_new_tokens else "")
    return Outcome({"text": "".join(pieces), "read_tokens": read, "new_tokens": reader.count - read})


def run_many(recipe: GenerateRecipe, path: Path) -> Outcome:
    """Continue every prompt of a file, many at a time, and write a line of JSON for each."""
    from latte.eval.many import continue_all, read_prompts
    from latte.loading import load_any

    prompts = read_prompts(path, recipe)
    model, tokenizer = load_any(recipe.model, weights=recipe.weights)
    answers = []
    for answer in continue_all(model, tokenizer, prompts, recipe.rows, lambda line: print(line, file=sys.stderr)):
        answers.append(asdict(answer))
        print(json.dumps(answers[-1], ensure_ascii=False), flush=True)
    return Outcome({"answers": answers, "new_tokens": sum(answer["new_tokens"] for answer in answers)})


@contextmanager
def _prompt(recipe: GenerateRecipe) -> Iterator[tuple[IO[bytes] | None, int | None]]:
    """The prompt as a file, and its size if that is known; opened first, so that a mistake costs no loading."""
    if recipe.prompt is not None:
        raw = recipe.prompt.encode("utf-8", "surrogateescape")
        yield io.BytesIO(raw), len(raw)
    elif recipe.prompt_file is not None:
        with open_text(recipe.prompt_file) as opened:
            yield opened
    else:
        yield None, None
