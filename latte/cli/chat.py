"""``latte chat``: a conversation with a model, whose state is kept between messages."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latte.cli.outcome import Outcome
from latte.cli.settings import parse
from latte.cli.texts import note_undecodable, open_text, reading_bar, show
from latte.errors import UserError, reason
from latte.recipe import ChatRecipe

if TYPE_CHECKING:
    from latte.eval.chat import Conversation

NEEDS = "latte.eval.chat"
PROMPT = "> "
DESCRIPTION = """Talk to a model: `latte chat MODEL`. Messages are laid out by the chat template of its tokenizer. Each
message and answer is read once; only the state is kept. On a terminal ctrl-C stops an answer and ctrl-D ends the
conversation; a line that begins with / is a command, and /help lists them. Otherwise every line of standard input is a
message: `echo Hello | latte chat MODEL`. --state starts from a document that `latte read` has read."""
EXAMPLE = "latte chat smollm2-135m --system 'Answer in one sentence.'"
COMMANDS = {
    "/help": "list these commands",
    "/read FILE": "read a text file as the beginning of the next message",
    "/retry": "ask the last message again, for another answer",
    "/save FOLDER": "save the state, for --state or /load",
    "/load FOLDER": "go on from a saved state",
    "/reset": "start again, from --state if it was given",
    "/quit": "end, as ctrl-D does",
}


def read(arguments: Sequence[str]) -> Callable[[], Outcome]:
    return partial(run, parse("chat", DESCRIPTION, ChatRecipe, arguments, positional="model", example=EXAMPLE))


def run(recipe: ChatRecipe) -> Outcome:
    """Answer until the input ends; exit code 1 if something failed that was not typed on a terminal."""
    from latte.eval.chat import Conversation
    from latte.eval.generate import Reader
    from latte.loading import load_any

    if recipe.state is not None and not Path(recipe.state).is_dir():
        raise UserError(f"there is no saved state {recipe.state}")
    model, tokenizer = load_any(recipe.model, weights=recipe.weights)
    conversation = Conversation(Reader(model, tokenizer, recipe.chunk), recipe.system)
    if recipe.state is not None:
        conversation.load(Path(recipe.state))
    if conversation.format.plain:
        _say(f"{recipe.model} has no chat template: messages are laid out as User: and Assistant:")
    chat = Chat(conversation, recipe, sys.stdin.isatty())
    if chat.interactive:
        _say("/help lists the commands, ctrl-C stops an answer, ctrl-D ends")
    code = chat.run()
    return Outcome({"turns": chat.turns, "read_tokens": conversation.reader.count}, code)


class Chat:
    """Carries out lines of input: messages and commands."""

    def __init__(self, conversation: Conversation, recipe: ChatRecipe, interactive: bool) -> None:
        self.conversation, self.recipe, self.interactive = conversation, recipe, interactive
        self.beginning = conversation.mark()
        self.turns: list[dict[str, Any]] = []  # for --json
        self.trained_for = getattr(conversation.reader.model.config, "max_position_embeddings", None)

    def run(self) -> int:
        """The exit code after the last line."""
        failed = False
        for line in _typed_lines() if self.interactive else _piped_lines():
            try:
                if self._do(line.strip()):
                    break
            except (ValueError, OSError) as error:
                _say(f"latte chat: {reason(error)}")
                failed = True
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
        return int(failed and not self.interactive)

    def _do(self, line: str) -> bool:
        """Carry out one line; True if it ends the conversation."""
        name, _, argument = line.partition(" ")
        if not line.startswith("/") or line.startswith("//"):
            if line:
                self.answer(line.removeprefix("/") if line.startswith("//") else line)
        elif name in ("/quit", "/exit"):
            return True
        elif line == "/help":
            _say("\n".join(f"{name:<14} {text}" for name, text in COMMANDS.items()))
            _say("A message that begins with / is written with two.")
        elif line == "/retry":
            self.answer(self.conversation.take_back())
        elif line == "/reset":
            self.conversation.rollback(self.beginning)
        elif name in ("/save", "/load", "/read"):
            self._with_path(name, argument.strip())
        else:
            raise UserError(f"unknown command {name}, expected one of {', '.join(COMMANDS)}")
        return False

    def _with_path(self, name: str, path: str) -> None:
        if not path:
            usage = next(usage for usage in COMMANDS if usage.startswith(name))
            raise UserError(f"{name} needs a name: {usage}")
        count = self.conversation.reader.count
        if name == "/read":
            self.read_document(path)
            _say(f"read {self.conversation.reader.count - count:,} tokens")
        elif name == "/save":
            self.conversation.save(Path(path))
            _say(f"saved the state after {count:,} tokens to {path}")
        else:
            self.conversation.load(Path(path))
            _say(f"goes on after {self.conversation.reader.count:,} tokens")

    def answer(self, message: str) -> None:
        """Read a message, and show the answer as it comes."""
        before = self.conversation.mark()
        pieces = []
        with _interrupts(self.interactive) as stopped:
            try:
                for piece in self.conversation.ask(message, self.recipe, stopped):
                    pieces.append(piece)
                    show(piece)
            except (ValueError, KeyboardInterrupt) as error:
                self.conversation.rollback(before)
                if isinstance(error, ValueError) or not self.interactive:
                    raise
            finally:
                show("\n")
        self.turns.append({"message": message, "answer": "".join(pieces)})
        reader = self.conversation.reader
        if self.trained_for is not None and reader.grows and reader.count > self.trained_for:
            _say(
                f"the conversation has {reader.count:,} tokens and the model was trained for "
                f"{self.trained_for:,}: its answers may get worse, /reset starts again"
            )
            self.trained_for = None  # said once

    def read_document(self, name: str) -> None:
        """Read a file; ctrl-C leaves the conversation as it was."""
        from latte.eval.generate import text_blocks

        before = self.conversation.mark()
        with open_text(name) as (file, size), reading_bar(size) as on_bytes:
            try:
                self.conversation.read_document(text_blocks(file, on_bytes, partial(note_undecodable, name)))
            except (ValueError, KeyboardInterrupt) as error:
                self.conversation.rollback(before)
                if isinstance(error, ValueError) or not self.interactive:
                    raise
                _say(f"stopped: nothing of {name} is kept")


def _typed_lines() -> Iterator[str]:
    """Lines from a terminal, with a prompt and, where Python has it, a history."""
    with suppress(ImportError):
        import readline  # noqa: F401  (input uses it)
    while True:
        try:
            yield input(PROMPT)
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def _piped_lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"line {number} of standard input is not UTF-8: {error.reason}") from error


@contextmanager
def _interrupts(caught: bool) -> Iterator[Callable[[], bool]]:
    """Whether ctrl-C was pressed; the second one raises, in case that the answer takes too long to end by itself."""
    pressed: list[int] = []

    def note(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, note) if caught else None
    try:
        yield lambda: bool(pressed)
    finally:
        if caught:
            signal.signal(signal.SIGINT, before)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
