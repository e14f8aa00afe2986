"""Reading a prompt of any length and continuing it; only the model's state is kept in memory."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Collection, Generator, Iterator
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from latte.data.tokenizer import cut_point
from latte.errors import UserError
from latte.eval.caches import load_cache, save_cache, snapshot
from latte.files import MANIFEST, Damaged, verify_folder, whole_folder, without_surrogates
from latte.generation.sampling import Sampling, choose
from latte.layers.hooks import unhooked
from latte.models import LatteCache
from latte.models.causal_lm import CausalLM
from latte.recipe import WriteRecipe

KIND = "latte-reading-1"
BLOCK = 1 << 16  # bytes of a prompt read at once
#: Fields of a configuration that say how a model is called or was stored, and nothing about its states.
RUN_TIME = {"use_cache", "dtype", "torch_dtype", "_name_or_path", "transformers_version", "architectures"} | {
    "return_dict",
    "output_hidden_states",
    "output_attentions",
    "problem_type",
    "id2label",
    "label2id",
}

#: Why a text ends: by its end token, a stop string, its greatest length, or because it was asked to.
Ended = Literal["end", "stop", "length", "stopped"]


class Mark(NamedTuple):
    """A moment of a reader to come back to."""

    cache: Any
    waiting: int | None
    read: int


class Reader:
    """A model and its position in a text: the state after all tokens but the last, and that last token.

    The last token is read when the next one is needed, so that a saved reader can either continue the text or read more
    of it.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, chunk: int = 512) -> None:
        self.model, self.tokenizer, self.chunk = model.eval(), tokenizer, chunk
        self.device = model.device  # kept: looking for it takes as long as a small layer
        self.cache: Any = None
        self.waiting: int | None = None
        self.count = 0  # tokens read, the waiting one included
        self.written: list[int] = []  # by the last write

    def read_ids(self, ids: list[int]) -> None:
        """Read tokens."""
        if not ids:
            return
        self.count += len(ids)
        pending = ([] if self.waiting is None else [self.waiting]) + ids
        self.waiting = pending.pop()
        for start in range(0, len(pending), self.chunk):
            self._forward(pending[start : start + self.chunk])

    def read_blocks(self, blocks: Iterator[str], literal: bool = False) -> None:
        """Read text in blocks, which are joined and cut where no token crosses the cut; a first text begins with bos.

        Args:
            literal: the names of special tokens in the text are text.
        """
        if self.count == 0:
            first = self.tokenizer.bos_token_id
            self.read_ids([] if first is None else [first])
        pending = ""
        for block in blocks:
            pending += block
            cut = cut_point(pending, 0, len(pending)) if len(pending) > 1 else len(pending)
            if cut == len(pending) and len(pending) < 16 * BLOCK:
                continue  # no place to cut yet: wait for more
            self.read_text(pending[:cut], literal)
            pending = pending[cut:]
        self.read_text(pending, literal)

    def write(self, recipe: WriteRecipe, ends: Collection[int] = ()) -> Generator[int, None, Ended]:
        """Sample tokens one at a time; each is read before the next is sampled. Returns why it ended.

        Args:
            ends: tokens that end the text, besides the model's own.

        Raises:
            UserError: nothing was read yet, and the model has no token to start with.
        """
        if self.waiting is None:
            raise UserError("there is nothing to continue: give a prompt, a prompt file or a saved state")
        sampling, self.written = sampling_of(recipe), []
        chance = sampling.generator(self.device)
        ends = {*ends, *self.ends()} if recipe.stop_at_end else set()
        for _ in range(recipe.max_new_tokens):
            (token,) = choose(self._forward([self.waiting]), [sampling], [self.written], [chance])
            self.waiting = token
            self.count += 1
            if token in ends:
                return "end"
            self.written.append(token)
            yield token
        return "length"

    def ends(self) -> set[int]:
        """The tokens that end a text, as the model's and the tokenizer's settings say."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        listed = configured if isinstance(configured, list) else [configured, self.tokenizer.eos_token_id]
        return {token for token in listed if token is not None}

    def mark(self) -> Mark:
        """This moment; :meth:`rollback` comes back to it, as often as needed."""
        return Mark(snapshot(self.cache), self.waiting, self.count)

    def rollback(self, mark: Mark) -> None:
        self.cache, self.waiting, self.count = snapshot(mark.cache), mark.waiting, mark.read

    @property
    def grows(self) -> bool:
        """Whether what is kept of a text grows with every token."""
        return self.cache is not None and not isinstance(self.cache, LatteCache)

    def drop_waiting(self) -> None:
        """Forget the last token, which no state has read yet."""
        if self.waiting is not None:
            self.waiting, self.count = None, self.count - 1

    def save(self, folder: Path, **more: Any) -> None:
        """Write the state and the waiting token to a folder, atomically.

        Args:
            more: JSON values to record beside them.

        Raises:
            UserError: nothing was read yet, the model's cache has no file format, or the disk is full.
        """
        check_free(folder)
        about = {"kind": KIND, "model": fingerprint(self.model), "waiting": self.waiting, "count": self.count}
        try:
            with whole_folder(folder, **about, **more) as scratch:
                save_cache(self.cache, scratch / "state.safetensors")
        except OSError as error:
            raise UserError(f"the state could not be written to {folder}: {error.strerror}") from error

    def load(self, folder: Path) -> dict[str, Any]:
        """Continue from a saved state; returns what was recorded beside it.

        Raises:
            UserError: there is none, it is damaged, or it is of another model.
        """
        if not folder.is_dir():
            raise UserError(f"there is no saved state {folder}")
        try:
            about = verify_folder(folder)
        except Damaged as error:
            raise UserError(f"the saved state is damaged: {error}") from error
        if about.get("kind") != KIND:
            raise UserError(f"{folder} is not a saved state")
        if about["model"] != fingerprint(self.model):
            raise UserError(f"the state in {folder} was saved by another model")
        self.cache = load_cache(folder / "state.safetensors", self.model)
        self.waiting, self.count = about["waiting"], about["count"]
        return about

    def read_text(self, text: str, literal: bool = False) -> None:
        """Read text that is tokenized by itself."""
        self.read_ids(self.encode(text, literal))

    def encode(self, text: str, literal: bool = False) -> list[int]:
        """The tokens of a text; ``literal`` takes the names of special tokens in it for text."""
        if not text:
            return []
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=literal, verbose=False)["input_ids"]

    @torch.no_grad()
    def _forward(self, ids: list[int]) -> Tensor:
        """Read tokens and return the logits after the last."""
        tokens = torch.tensor([ids], device=self.device)
        logits = self._decode(tokens)
        if logits is not None:
            return logits[:, -1]
        output = self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = output.past_key_values
        return output.logits[:, -1]

    def _decode(self, ids_BT: Tensor) -> Tensor | None:
        """Logits behind one token, from the decode engine itself; None where the model has to be called.

        What a call of the model does around it, for every kind of input, takes longer than some layers.
        """
        model = self.model
        if ids_BT.shape[1] != 1 or not isinstance(model, CausalLM) or not isinstance(self.cache, LatteCache):
            return None
        if type(model).forward is not CausalLM.forward or not unhooked(model) or self.cache.is_recording_past():
            return None
        return model.decode_each(ids_BT, self.cache)


def stream_text(
    reader: Reader,
    recipe: WriteRecipe,
    ends: Collection[int] = (),
    stopped: Callable[[], bool] = lambda: False,
) -> Generator[str, None, Ended]:
    """The continuation as text, in pieces of complete characters and without stop strings; returns why it ended.

    Args:
        ends: tokens that end the text, besides the model's own.
        stopped: asked after each token whether to end there.
    """
    tokenizer = reader.tokenizer
    done: list[int] = []
    shown = held = ""
    tokens = reader.write(recipe, ends)
    ended: Ended | None = None
    while ended is None:
        try:
            done.append(next(tokens))
        except StopIteration as finished:
            ended = finished.value
        if stopped():
            ended = ended or "stopped"
        text = str(tokenizer.decode(done, skip_special_tokens=True))
        if text.endswith("\ufffd"):  # an incomplete character
            if ended is None:
                continue  # its other bytes follow
            text = text.rstrip("\ufffd")
        held += text[len(shown) :]
        # Start again at line ends, so that the list to decode stays short.
        done, shown = ([], "") if len(done) > 64 and text.endswith("\n") else (done, text)
        found = [at for at in (held.find(stop) for stop in recipe.stop) if at >= 0]
        ready = min(found) if found else len(held) - (0 if ended else _unsure(held, recipe.stop))
        if ready:
            yield held[:ready]
        held = held[ready:]
        if found:
            return "stop"
    return ended


def _unsure(text: str, stops: list[str]) -> int:
    """The length of the longest end of a text that may become a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(stop.startswith(text[len(text) - n :]) for stop in stops)), 0)


def check_free(folder: Path) -> None:
    """Look whether a state may be saved there.

    Raises:
        UserError: there is something else than a saved state.
    """
    if folder.exists() and not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} exists and is not a saved state: give another name")


def text_blocks(
    file: IO[bytes],
    on_bytes: Callable[[int], None] = lambda count: None,
    on_undecodable: Callable[[int], None] = lambda count: None,
) -> Iterator[str]:
    """A file's text in blocks of bounded size.

    Args:
        on_bytes: called with the size of every block.
        on_undecodable: called once in the end, with the number of bytes that are not UTF-8 and read as U+FFFD.
    """
    decoder, bad = codecs.getincrementaldecoder("utf-8")(errors="surrogateescape"), 0
    while block := file.read(BLOCK):
        text, count = without_surrogates(decoder.decode(block))
        yield text
        on_bytes(len(block))
        bad += count
    text, count = without_surrogates(decoder.decode(b"", final=True))
    yield text
    on_undecodable(bad + count)


def fingerprint(model: Any) -> str:
    """A digest of a model's configuration, without what does not change its numbers, and of each parameter's start."""
    config = {name: value for name, value in model.config.to_diff_dict().items() if name not in RUN_TIME}
    total = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in model.named_parameters():
        total.update(f"{name}{tuple(tensor.shape)}".encode())
        total.update(tensor.detach().flatten()[:16].float().cpu().numpy().tobytes())
    return total.hexdigest()


def sampling_of(recipe: WriteRecipe) -> Sampling:
    """A recipe's settings of the next token."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return Sampling(**{name: getattr(recipe, name) for name in names})
