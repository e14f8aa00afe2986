"""Conversations with a model: each message and answer is read once, and the state after them is all that is kept."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from latte.errors import UserError, reason
from latte.eval.generate import Ended, Mark, Reader, stream_text
from latte.recipe import ChatRecipe

#: What a conversation has read last: nothing, text outside of any conversation, a document, or an answer.
Place = Literal["start", "text", "document", "answer"]
#: Stand for messages when a template is rendered: letters and digits alone, which no template changes.
MARKS = ("MESSAGE0b7e1f", "ANSWER5d20c9", "MESSAGE94a6c3")


@dataclass(frozen=True)
class ChatFormat:
    """The text that a chat template puts between documents, messages and answers."""

    opening: str  # before the first message
    before_document: str
    after_document: str  # between a document and the first message
    asked: str  # between a message and its answer
    answered: str  # between an answer and the next message
    stops: tuple[str, ...] = ()  # strings that end an answer
    plain: bool = False  # there is no template

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> ChatFormat:
        """The format of a tokenizer's chat template, or a plain one if it has none.

        Raises:
            UserError: the template refuses a system prompt, or can't be used for a conversation.
        """
        if not tokenizer.chat_template:
            return cls.plain_text(str(tokenizer.bos_token or ""), system)
        first, answer, second = MARKS
        before = [] if system is None else [{"role": "system", "content": system}]
        turns = [{"role": "user", "content": first}, {"role": "assistant", "content": answer}]
        turns.append({"role": "user", "content": second})
        try:
            asked = str(tokenizer.apply_chat_template([*before, turns[0]], tokenize=False, add_generation_prompt=True))
            whole = str(tokenizer.apply_chat_template([*before, *turns], tokenize=False, add_generation_prompt=True))
        except Exception as error:  # templates raise what they like
            about = "" if system is None else " and a system prompt"
            raise UserError(
                f"the chat template can't be used for a conversation of two messages{about}: {reason(error)}"
            ) from error
        if asked.count(first) != 1 or any(whole.count(mark) != 1 for mark in (answer, second)):
            raise UserError("the chat template does not show every message once, expected one that does")
        opening, _, after = asked.partition(first)
        answered = whole.partition(answer)[2].partition(second)[0]
        return cls(opening, opening, "\n\n", after, answered)

    @classmethod
    def plain_text(cls, bos: str, system: str | None) -> ChatFormat:
        """A dialogue as plain text, as a model that was trained on text may have seen one."""
        head = bos + ("" if system is None else f"{system}\n\n")
        return cls(f"{head}User:", head, "\n\nUser:", "\nAssistant:", "\nUser:", ("\nUser:",), plain=True)


class Moment(NamedTuple):
    """Where a conversation was, to come back to."""

    reader: Mark
    place: Place
    last: tuple[Moment, str] | None  # the moment before the last message, and that message
    format: ChatFormat
    system: str | None


class Conversation:
    """A reader in a dialogue. A turn reads the new message and writes the answer; nothing is read a second time."""

    def __init__(self, reader: Reader, system: str | None = None) -> None:
        self.reader, self.system = reader, system
        self.format = ChatFormat.of(reader.tokenizer, system)
        added = reader.tokenizer.added_tokens_decoder
        self._specials = {token: str(about.content) for token, about in added.items() if about.special}
        self.place: Place = "start"
        self.turns = 0
        self.last: tuple[Moment, str] | None = None

    def read_document(self, blocks: Iterator[str]) -> None:
        """Read a document as the beginning of the next message; special tokens in it are text."""
        self.reader.read_text(self._head(self.format.before_document, "\n\n"))
        self.reader.read_blocks(blocks, literal=True)
        self.place = "document"

    def ask(
        self, message: str, recipe: ChatRecipe, stopped: Callable[[], bool] = lambda: False
    ) -> Generator[str, None, Ended]:
        """Read a message and write the answer, in pieces; returns why the answer ended.

        Args:
            stopped: asked after each token whether to end the answer there.
        """
        self.last = (self.mark()._replace(last=None), message)
        head = self._head(self.format.opening, self.format.after_document)
        space = " " if self.format.plain else ""
        self.reader.read_ids(self._encode(head, space + message, self.format.asked))
        start = self.reader.mark()
        settings = replace(recipe, seed=recipe.seed + self.turns, stop=[*recipe.stop, *self.format.stops])
        self.place, self.turns = "answer", self.turns + 1
        text = ""
        stream = stream_text(self.reader, settings, self._ends(), stopped)
        ended: Ended | None = None
        while ended is None:
            try:
                piece = next(stream)
            except StopIteration as finished:
                ended = finished.value
                break
            shown = piece if text.strip() else piece.lstrip()
            text += piece
            if shown:
                yield shown
        if ended == "stop":  # the state has read the stop string: go back, and read the answer without it
            written = self.reader.written
            self.reader.rollback(start)
            self.reader.read_ids(self._tokens_of(text, written))
        return ended

    def take_back(self) -> str:
        """Return to the moment before the last message, and give that message.

        Raises:
            UserError: there is none.
        """
        if self.last is None:
            raise UserError("there is no message yet")
        before, message = self.last
        self.rollback(before)
        return message

    def mark(self) -> Moment:
        """This moment; :meth:`rollback` comes back to it, as often as needed."""
        return Moment(self.reader.mark(), self.place, self.last, self.format, self.system)

    def rollback(self, moment: Moment) -> None:
        self.reader.rollback(moment.reader)
        _, self.place, self.last, self.format, self.system = moment

    def save(self, folder: Path) -> None:
        """Write the state to a folder; :meth:`load` goes on from it.

        Raises:
            UserError: as :meth:`Reader.save`.
        """
        self.reader.save(folder, chat={"place": self.place, "turns": self.turns, "system": self.system})

    def load(self, folder: Path) -> None:
        """Go on from a saved state, of a conversation or of any text.

        Raises:
            UserError: as :meth:`Reader.load`; it has another system prompt than this conversation.
        """
        before = self.mark()
        chat: dict[str, Any] = self.reader.load(folder).get("chat") or {"place": "text", "turns": 0}
        system = chat.get("system", self.system)
        if self.system not in (None, system):
            self.rollback(before)
            raise UserError(f"the state in {folder} has read its system prompt already, expected no other one")
        self.format, self.system = ChatFormat.of(self.reader.tokenizer, system), system
        self.place, self.turns, self.last = chat["place"], chat["turns"], None

    def _head(self, opening: str, after_document: str) -> str:
        """The text that ends what was read last and opens a message.

        An end token that the model wrote is not read twice, and not at all where the template has another.
        """
        if self.place == "text":
            return "\n\n" + opening.removeprefix(str(self.reader.tokenizer.bos_token or ""))
        if self.place != "answer":
            return after_document if self.place == "document" else opening
        head, waiting = self.format.answered, self.reader.waiting
        if waiting in {*self.reader.ends(), *self._ends()}:
            name = str(self.reader.tokenizer.convert_ids_to_tokens(waiting))
            if head.lstrip().startswith(name):
                return head.lstrip().removeprefix(name)
            self.reader.drop_waiting()
        return head

    def _ends(self) -> list[int]:
        """The special token after an answer in the template, which ends the answer when the model writes it."""
        ids = self.reader.encode(self.format.answered.lstrip())[:1]
        return [token for token in ids if token in self._specials]

    def _encode(self, head: str, message: str, tail: str) -> list[int]:
        """The tokens of a message between parts of the template; names of special tokens in it are text."""
        if not any(name in message for name in self._specials.values()):
            return self.reader.encode(head + message + tail)  # tokens may cross from one into the other
        return [*self.reader.encode(head), *self.reader.encode(message, literal=True), *self.reader.encode(tail)]

    def _tokens_of(self, text: str, written: list[int]) -> list[int]:
        """The first written tokens, as far as they spell the text, and tokens of what is left of it."""
        decode = self.reader.tokenizer.decode
        for length in range(len(written), -1, -1):
            spelt = str(decode(written[:length], skip_special_tokens=True))
            if text.startswith(spelt):
                return written[:length] + self.reader.encode(text[len(spelt) :], literal=True)
        return self.reader.encode(text, literal=True)
