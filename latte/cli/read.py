"""``latte read``: read a document once and save the state, for ``latte chat`` to answer questions about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from latte.cli.outcome import Outcome
from latte.cli.settings import parse
from latte.cli.texts import note_undecodable, open_text, reading_bar
from latte.recipe import ReadRecipe

NEEDS = "latte.eval.chat"
DESCRIPTION = """Read a document of any length once and save the model's state: `latte read MODEL --file doc.txt --out
state`. `latte chat MODEL --state state` answers questions about it, as often as you like, without reading it again."""
EXAMPLE = "latte read runs/mine --file doc.txt --out state"


def read(arguments: Sequence[str]) -> Callable[[], Outcome]:
    return partial(run, parse("read", DESCRIPTION, ReadRecipe, arguments, positional="model", example=EXAMPLE))


def run(recipe: ReadRecipe) -> Outcome:
    """Read, save, and say how much was read."""
    from latte.eval.chat import Conversation
    from latte.eval.generate import Reader, check_free, text_blocks
    from latte.loading import load_any

    out = Path(recipe.out)
    check_free(out)
    with open_text(recipe.file) as (file, size):
        model, tokenizer = load_any(recipe.model)
        conversation = Conversation(Reader(model, tokenizer, recipe.chunk), recipe.system)
        with reading_bar(size) as on_bytes:
            conversation.read_document(text_blocks(file, on_bytes, partial(note_undecodable, recipe.file)))
    conversation.save(out)
    written = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {conversation.reader.count:,} tokens read, {written / 1024:,.0f} KiB")
    return Outcome({"out": out, "read_tokens": conversation.reader.count, "bytes": written})
