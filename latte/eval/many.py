"""Many prompts continued at once: a file of prompts, one running batch, and an answer for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from latte.errors import UserError
from latte.eval.generate import Reader, sampling_of, stream_text
from latte.generation import Batch, Request, Ticket
from latte.generation.batching import require_rows
from latte.recipe import GenerateRecipe, WriteRecipe

#: Settings that a line of JSON may have beside its prompt.
OWN = (
    "max_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_at_end",
)


@dataclass(frozen=True)
class Prompt:
    """A text and the settings that hold for it."""

    text: str
    settings: WriteRecipe


@dataclass(frozen=True)
class Answer:
    """A prompt's continuation, how many tokens it has, and why it ended: ``length`` or ``stop``."""

    prompt: str
    text: str
    new_tokens: int
    ended: str


def read_prompts(path: Path, recipe: GenerateRecipe) -> list[Prompt]:
    """The prompts of a file: JSON lines if its name ends so, else lines of text; empty lines are left out.

    Raises:
        UserError: no such file, no prompts, or a line that is not as it should be.
    """
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8: {error}") from error
    given = {field.name: getattr(recipe, field.name) for field in fields(WriteRecipe)}
    settings = WriteRecipe(**given)
    as_json = path.suffix in (".jsonl", ".json")
    prompts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            prompts.append(_from_json(line, settings, f"{path}:{number}") if as_json else Prompt(line, settings))
    if not prompts:
        raise UserError(f"{path} has no prompts, expected one a line")
    return prompts


def _from_json(line: str, settings: WriteRecipe, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from error
    text = entry.pop("prompt", None) if isinstance(entry, dict) else None
    if not isinstance(text, str):
        raise UserError(f'{where} has no text \'prompt\', expected an object such as {{"prompt": "def "}}')
    strange = sorted(set(entry) - set(OWN))
    if strange:
        raise UserError(f"{where} has {strange[0]!r}, expected some of {', '.join(OWN)}")
    for name, value in entry.items():
        known = getattr(settings, name)
        number = isinstance(known, int | float) and not isinstance(known, bool)
        fits = isinstance(value, int | float) and not isinstance(value, bool) if number else type(value) is type(known)
        if not fits or (type(known) is int and not isinstance(value, int)):
            raise UserError(f"{where}: {name} is {value!r}, expected a value such as {known!r}")
    try:
        return Prompt(text, replace(settings, **entry))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def continue_all(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    rows: int,
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[Answer]:
    """An answer for every prompt, in their order, each as soon as it and those before it are there.

    ``rows`` are written at a time. A model that keeps no rows of one size answers one prompt after another.
    """
    try:
        require_rows(model)
    except ValueError as error:
        say(f"one prompt after another: {error}")
        yield from (_alone(model, tokenizer, prompt) for prompt in prompts)
        return
    batch = Batch(model, max_rows=rows, chunk=prompts[0].settings.chunk)
    reader = Reader(model, tokenizer)
    tickets = [batch.submit(_request(reader, prompt)) for prompt in prompts]
    for prompt, ticket in zip(prompts, tickets, strict=True):
        while not ticket.done:
            batch.step()
        yield _answer(tokenizer, prompt, ticket)


def _request(reader: Reader, prompt: Prompt) -> Request:
    tokenizer, settings = reader.tokenizer, prompt.settings
    first = tokenizer.bos_token_id
    ids = [] if first is None else [first]
    ids += tokenizer(prompt.text, add_special_tokens=False, verbose=False)["input_ids"]
    # Every token has a byte or more: a stop string is in as many of the last tokens as it has bytes, and a few more.
    most = max((len(stop.encode()) for stop in settings.stop), default=0) + 8

    def stops(tokens: list[int]) -> bool:
        tail = str(tokenizer.decode(tokens[-most:], skip_special_tokens=True))
        return any(stop in tail for stop in settings.stop)

    return Request(
        ids,
        settings.max_new_tokens,
        sampling_of(settings),
        stop_ids=reader.ends() if settings.stop_at_end else (),
        stop=stops if settings.stop else None,
    )


def _answer(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, ticket: Ticket) -> Answer:
    text = str(tokenizer.decode(ticket.tokens, skip_special_tokens=True)).rstrip("\ufffd")
    found = [at for at in (text.find(stop) for stop in prompt.settings.stop) if at >= 0]
    ended = "stop" if found else ticket.ended
    assert ended is not None
    return Answer(prompt.text, text[: min(found)] if found else text, len(ticket.tokens), ended)


def _alone(model: Any, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Answer:
    reader = Reader(model, tokenizer, prompt.settings.chunk)
    reader.read_blocks(iter([prompt.text]))
    pieces, stream = list[str](), stream_text(reader, prompt.settings)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as finished:
            ended = "length" if finished.value == "length" else "stop"
            return Answer(prompt.text, "".join(pieces), len(reader.written), ended)
