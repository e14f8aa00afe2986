"""Text to token files: split by document, tokenised once, memory-mapped, cached by content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from latte.data.arrays import is_whole
from latte.data.sources import Source, open_source
from latte.data.tokenizer import (
    byte_tokenizer,
    encode_documents,
    fingerprint,
    load_tokenizer,
    save_tokenizer,
    train_bpe,
)
from latte.errors import UserError
from latte.files import Damaged, digest_json, verify_folder, whole_folder
from latte.recipe import AUTO, DataRecipe

VERSION = 1  # of the format of the cached files; part of the cache key
PARTS = ("train", "valid")


@dataclass(frozen=True)
class CorpusPart:
    """One part of a corpus: the concatenated ids of its documents, and where each begins."""

    ids: np.ndarray  # memory-mapped
    starts: np.ndarray  # first id of each document, and the end of the last
    text_bytes: np.ndarray  # length of each document's text

    @property
    def num_documents(self) -> int:
        return len(self.starts) - 1

    def document(self, index: int) -> np.ndarray:
        return np.asarray(self.ids[self.starts[index] : self.starts[index + 1]], dtype=np.int64)

    def documents(self) -> Iterator[tuple[np.ndarray, int]]:
        """Ids and length in bytes of every document."""
        return ((self.document(index), int(self.text_bytes[index])) for index in range(self.num_documents))


@dataclass(frozen=True)
class Corpus:
    """Training part, validation part, and the tokenizer that encoded them."""

    train: CorpusPart
    valid: CorpusPart
    tokenizer: PreTrainedTokenizerBase
    digest: str
    notes: tuple[str, ...] = ()  # what a user should know about the text, in sentences


def cache_folder(recipe: DataRecipe) -> Path:
    return Path(recipe.cache or os.environ.get("LATTE_CACHE") or "~/.cache/latte").expanduser()


def prepare(
    recipe: DataRecipe,
    say: Callable[[str], None] = lambda message: None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Corpus:
    """Tokenise a recipe's text, or read the tokens from the cache if the same bytes were tokenised the same way before.

    Args:
        say: called with a message before a slow step, and with what a user should know about the text.
        tokenizer: used instead of the recipe's.

    Raises:
        UserError: no text, too little to split, or what :func:`open_source` and :func:`load_tokenizer` raise.
    """
    source = open_source(recipe.source, recipe)
    valid = None if recipe.valid_source is None else open_source(recipe.valid_source, recipe)
    tokenizer = tokenizer or given_tokenizer(recipe.tokenizer)
    key = digest_json(
        {
            "version": VERSION,
            "source": source.digest(),
            "valid": None if valid is None else valid.digest(),
            "split": [recipe.split, recipe.valid_fraction, recipe.split_seed],
            "tokenizer": ["bpe", recipe.vocab_size] if tokenizer is None else fingerprint(tokenizer),
        }
    )
    folder = cache_folder(recipe) / "tokens" / key[:32]
    if not is_whole(folder):
        say(f"tokenising {recipe.source}")
        _build(folder, source, valid, tokenizer, recipe)
    corpus = _open(folder, key)
    for note in corpus.notes:
        say(note)
    return corpus


def part_of(text: str, fraction: float, seed: int) -> str:
    """train or valid, by a hash of the document's text: equal documents are always in the same part."""
    digest = hashlib.sha256(f"{seed}:".encode() + text.encode("utf-8", "replace")).digest()
    return "valid" if int.from_bytes(digest[:8], "big") < fraction * 2**64 else "train"


def _split(source: Source, valid: Source | None, recipe: DataRecipe) -> Callable[[], Iterator[tuple[str, str]]]:
    """A function that iterates over all documents, each with the part it belongs to."""
    if valid is not None:

        def pairs() -> Iterator[tuple[str, str]]:
            yield from (("train", text) for text in source.documents())
            yield from (("valid", text) for text in valid.documents())

    elif recipe.split == "document":

        def pairs() -> Iterator[tuple[str, str]]:
            for text in source.documents():
                yield part_of(text, recipe.valid_fraction, recipe.split_seed), text

    else:
        pairs = _tail(source, recipe.valid_fraction)
    return pairs


def _tail(source: Source, fraction: float) -> Callable[[], Iterator[tuple[str, str]]]:
    """All documents, of which the last ``fraction`` of the characters is for validation."""
    cut = round(sum(len(text) for text in source.documents()) * (1 - fraction))

    def pairs() -> Iterator[tuple[str, str]]:
        read = 0
        for text in source.documents():
            here = min(max(cut - read, 0), len(text))
            yield from ((part, piece) for part, piece in zip(PARTS, (text[:here], text[here:]), strict=True) if piece)
            read += len(text)

    return pairs


def given_tokenizer(name: str) -> PreTrainedTokenizerBase | None:
    """The tokenizer of that name; None if it is to be trained on the text."""
    if name in ("bpe", AUTO):
        return None
    return byte_tokenizer() if name == "bytes" else load_tokenizer(name)


def _build(
    folder: Path, source: Source, valid: Source | None, tokenizer: PreTrainedTokenizerBase | None, recipe: DataRecipe
) -> None:
    pairs = _split(source, valid, recipe)
    counts = _count(pairs)
    notes = []
    if valid is None and recipe.split == "document" and any(counts.values()) and not all(counts.values()):
        total = sum(counts.values())
        few = "is one document" if total == 1 else f"has {total} documents, too few to divide them"
        if total == 1 and recipe.separator is not None:
            few += f" (data.separator {recipe.separator!r} does not occur in it)"
        notes.append(f"{recipe.source} {few}: the last {recipe.valid_fraction:.3g} of the text is for validation")
        pairs = _tail(source, recipe.valid_fraction)
        counts = _count(pairs)
    _require_both(counts, recipe)
    notes += [*source.notes(), *([] if valid is None else valid.notes())]
    if tokenizer is None:
        tokenizer = train_bpe((text for part, text in pairs() if part == "train"), recipe.vocab_size)
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    with whole_folder(folder) as scratch:
        save_tokenizer(tokenizer, scratch / "tokenizer")
        starts: dict[str, list[int]] = {part: [0] for part in PARTS}
        sizes: dict[str, list[int]] = {part: [] for part in PARTS}
        with (scratch / "train.ids").open("wb") as train_file, (scratch / "valid.ids").open("wb") as valid_file:
            files = dict(zip(PARTS, (train_file, valid_file), strict=True))
            for batch in _batches(pairs()):
                for (part, text), ids in zip(batch, encode_documents(tokenizer, [t for _, t in batch]), strict=True):
                    files[part].write(ids.astype(dtype).tobytes())
                    starts[part].append(starts[part][-1] + len(ids))
                    sizes[part].append(len(text.encode("utf-8", "replace")))
        for part in PARTS:
            np.save(scratch / f"{part}.starts.npy", np.array(starts[part], dtype=np.int64))
            np.save(scratch / f"{part}.bytes.npy", np.array(sizes[part], dtype=np.int64))
        about = {"dtype": np.dtype(dtype).name, "notes": notes}
        (scratch / "meta.json").write_text(json.dumps(about), encoding="utf-8")


def _batches(pairs: Iterator[tuple[str, str]], characters: int = 1 << 22) -> Iterator[list[tuple[str, str]]]:
    """Documents in groups: large enough to use all cores in one call, small enough for memory."""
    batch: list[tuple[str, str]] = []
    size = 0
    for pair in pairs:
        batch.append(pair)
        size += len(pair[1])
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _count(pairs: Callable[[], Iterator[tuple[str, str]]]) -> dict[str, int]:
    """Number of documents in each part."""
    counts = dict.fromkeys(PARTS, 0)
    for part, _ in pairs():
        counts[part] += 1
    return counts


def _require_both(counts: dict[str, int], recipe: DataRecipe) -> None:
    if not any(counts.values()):
        raise UserError(f"the corpus is empty: there is no text in {recipe.source}")
    for part, count in counts.items():
        if count:
            continue
        if recipe.valid_source is not None:
            raise UserError(f"there is no text in {recipe.source if part == 'train' else recipe.valid_source}")
        raise UserError(
            f"there is too little text in {recipe.source} to divide it: data.valid_fraction of "
            f"{recipe.valid_fraction} leaves none for {part}"
        )


def check_cache(folder: Path) -> bool:
    """Whether a cached folder matches its checksums."""
    try:
        verify_folder(folder)
    except Damaged:
        return False
    return True


def _open(folder: Path, key: str) -> Corpus:
    about = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    dtype = np.dtype(about["dtype"])
    train, valid = (
        CorpusPart(
            ids=np.memmap(folder / f"{part}.ids", dtype=dtype, mode="r"),
            starts=np.load(folder / f"{part}.starts.npy"),
            text_bytes=np.load(folder / f"{part}.bytes.npy"),
        )
        for part in PARTS
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    return Corpus(train, valid, tokenizer, key, tuple(about.get("notes", ())))
