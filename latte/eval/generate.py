"""Reading a prompt of any length and continuing it; only the model's state is kept in memory."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from latte.data.tokenizer import cut_point
from latte.errors import UserError
from latte.files import Damaged, verify_folder, whole_folder
from latte.models import LatteCache
from latte.recipe import GenerateRecipe

KIND = "latte-reading-1"
BLOCK = 1 << 16  # bytes of a prompt read at once
REMEMBERED = 1024  # written tokens that the repetition penalty applies to


class Reader:
    """A model and its position in a text: the state after all tokens but the last, and that last token.

    The last token is read when the next one is needed, so that a saved reader can either continue the text or read more
    of it.
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, chunk: int = 512) -> None:
        self.model, self.tokenizer, self.chunk = model.eval(), tokenizer, chunk
        self.cache: Any = None
        self.waiting: int | None = None
        self.count = 0  # tokens read, the waiting one included

    def read_ids(self, ids: list[int]) -> None:
        """Read tokens."""
        if not ids:
            return
        self.count += len(ids)
        pending = ([] if self.waiting is None else [self.waiting]) + ids
        self.waiting = pending.pop()
        for start in range(0, len(pending), self.chunk):
            self._forward(pending[start : start + self.chunk])

    def read_blocks(self, blocks: Iterator[str]) -> None:
        """Read bos and then text in blocks, which are joined and cut where no token crosses the cut."""
        if self.count == 0:
            first = self.tokenizer.bos_token_id
            self.read_ids([] if first is None else [first])
        pending = ""
        for block in blocks:
            pending += block
            cut = cut_point(pending, 0, len(pending)) if len(pending) > 1 else len(pending)
            if cut == len(pending) and len(pending) < 16 * BLOCK:
                continue  # no place to cut yet: wait for more
            self._read_text(pending[:cut])
            pending = pending[cut:]
        self._read_text(pending)

    def write(self, recipe: GenerateRecipe) -> Iterator[int]:
        """Sample tokens one at a time; each is read before the next is sampled.

        Raises:
            UserError: nothing was read yet, and the model has no token to start with.
        """
        if self.waiting is None:
            raise UserError("there is nothing to continue: give a prompt, a prompt file or a saved state")
        chance = torch.Generator(device=self.model.device).manual_seed(recipe.seed)
        warpers, written = _warpers(recipe), list[int]()
        ends = _ends(self.model, self.tokenizer) if recipe.stop_at_end else set()
        for _ in range(recipe.max_new_tokens):
            logits = self._forward([self.waiting]).float()
            context = torch.tensor([written[-REMEMBERED:]], dtype=torch.long, device=logits.device)
            scores: Tensor = warpers(context, logits)  # type: ignore[arg-type]
            if recipe.temperature == 0:
                token = int(scores.argmax())
            else:
                token = int(torch.multinomial(scores.softmax(dim=-1), 1, generator=chance))
            self.waiting = token
            self.count += 1
            if token in ends:
                return
            written.append(token)
            yield token

    def save(self, folder: Path) -> None:
        """Write the state and the waiting token to a folder, atomically.

        Raises:
            UserError: nothing was read yet, the model keeps no state of one size, or the disk is full.
        """
        if not isinstance(self.cache, LatteCache):
            what = "nothing was read yet" if self.cache is None else f"a {type(self.cache).__name__} can't be saved"
            raise UserError(f"the state can't be saved: {what}")
        if folder.exists() and not (folder / "manifest.json").is_file():
            raise UserError(f"{folder} exists and is not a saved state: give another name")
        about = {"kind": KIND, "model": fingerprint(self.model), "waiting": self.waiting, "count": self.count}
        try:
            with whole_folder(folder, **about) as scratch:
                self.cache.save(scratch / "state.safetensors")
        except OSError as error:
            raise UserError(f"the state could not be written to {folder}: {error.strerror}") from error

    def load(self, folder: Path) -> None:
        """Continue from a saved state.

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
        self.cache = LatteCache.load(folder / "state.safetensors", self.model.device)
        self.waiting, self.count = about["waiting"], about["count"]

    def _read_text(self, text: str) -> None:
        if text:
            self.read_ids(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    @torch.no_grad()
    def _forward(self, ids: list[int]) -> Tensor:
        """Read tokens and return the logits after the last."""
        tokens = torch.tensor([ids], device=self.model.device)
        output = self.model(input_ids=tokens, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = output.past_key_values
        return output.logits[:, -1]


def stream_text(reader: Reader, recipe: GenerateRecipe) -> Iterator[str]:
    """The continuation as text, in pieces of complete characters."""
    tokenizer = reader.tokenizer
    done: list[int] = []
    shown = ""
    for token in reader.write(recipe):
        done.append(token)
        text = str(tokenizer.decode(done, skip_special_tokens=True))
        if text.endswith("\ufffd"):
            continue  # an incomplete character: its other bytes follow
        yield text[len(shown) :]
        # Start again at line ends, so that the list to decode stays short.
        done, shown = ([], "") if len(done) > 64 and text.endswith("\n") else (done, text)


def text_blocks(file: IO[bytes], on_bytes: Callable[[int], None] = lambda count: None) -> Iterator[str]:
    """A file's text in blocks of bounded size."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while block := file.read(BLOCK):
        yield decoder.decode(block)
        on_bytes(len(block))
    yield decoder.decode(b"", final=True)


def fingerprint(model: Any) -> str:
    """A digest of a model's configuration and the first values of each parameter."""
    total = hashlib.sha256(json.dumps(model.config.to_diff_dict(), sort_keys=True, default=str).encode())
    for name, tensor in model.named_parameters():
        total.update(f"{name}{tuple(tensor.shape)}".encode())
        total.update(tensor.detach().flatten()[:16].float().cpu().numpy().tobytes())
    return total.hexdigest()


def _warpers(recipe: GenerateRecipe) -> LogitsProcessorList:
    chosen: list[Any] = []
    if recipe.repetition_penalty != 1:
        chosen.append(RepetitionPenaltyLogitsProcessor(recipe.repetition_penalty))
    if recipe.temperature > 0:
        chosen.append(TemperatureLogitsWarper(float(recipe.temperature)))
        if recipe.top_k > 0:
            chosen.append(TopKLogitsWarper(recipe.top_k))
        if recipe.top_p < 1:
            chosen.append(TopPLogitsWarper(recipe.top_p))
        if recipe.min_p > 0:
            chosen.append(MinPLogitsWarper(recipe.min_p))
    return LogitsProcessorList(chosen)


def _ends(model: Any, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured, tokenizer.eos_token_id]
    return {token for token in listed if token is not None}
