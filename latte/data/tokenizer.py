"""Tokenizers: byte-level BPE trained here, plain bytes, or any tokenizer of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from latte.errors import UserError, reason
from latte.files import digest_json, may_be_on_hub

END_OF_TEXT = "<|endoftext|>"
# Longer documents are encoded in pieces: one call on a hundred megabytes would need gigabytes.
PIECE = 1 << 18


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of ``vocab_size`` entries, the 256 bytes and the end of text among them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    return _wrap(backend)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token b is byte b; 256 is the end of text."""
    backend = Tokenizer(models.BPE(vocab={_byte_symbol(byte): byte for byte in range(256)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return _wrap(backend)


def symbol_tokenizer(symbols: Sequence[str]) -> PreTrainedTokenizerFast:
    """Token n is ``symbols[n]``, texts are symbols with spaces between them; the first also ends a text."""
    backend = Tokenizer(models.WordLevel({symbol: number for number, symbol in enumerate(symbols)}, symbols[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=symbols[0],
        bos_token=symbols[0],
        eos_token=symbols[0],
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(name: str, *, source: object = None, **settings: Any) -> PreTrainedTokenizerBase:
    """A tokenizer of transformers, by folder or name on the hub; no code of its repository is run.

    Args:
        source: the model that the tokenizer belongs to, for messages; None if the user named the tokenizer itself.
        settings: passed to ``from_pretrained``.

    Raises:
        UserError: there is none, or it marks neither the beginning nor the end of a document.
    """
    unknown = f"there is no tokenizer {name!r}: neither bpe nor bytes, a folder, or a name on the hub"
    if source is None and not Path(name).exists() and not may_be_on_hub(name):
        raise UserError(unknown)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **settings)
    except Exception as error:  # transformers and tokenizers raise errors of many types
        message = unknown if source is None else f"there is no usable tokenizer in {source}: {reason(error)}"
        raise UserError(message) from error
    if tokenizer.eos_token_id is None and tokenizer.bos_token_id is None:
        which = repr(name) if source is None else f"in {source}"
        raise UserError(f"the tokenizer {which} has neither a first nor a last token of a document (bos, eos)")
    return tokenizer


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of everything that determines the tokenizer's output."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    core: Any = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return digest_json([core, tokenizer.bos_token_id, tokenizer.eos_token_id])


def is_bytes(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether token ids are the bytes themselves."""
    return len(tokenizer) == 257 and tokenizer.convert_ids_to_tokens([0, 65, 255]) == [
        _byte_symbol(byte) for byte in (0, 65, 255)
    ]


def encode_documents(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[np.ndarray]:
    """Each document's ids: bos, the text, eos. Without a bos token the document begins with eos."""
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    last = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if is_bytes(tokenizer):
        bodies = [np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8) for text in texts]
    else:
        cut = [list(pieces(text)) for text in texts]
        flat = iter(_encode(tokenizer, [piece for parts in cut for piece in parts]))
        bodies = [np.concatenate([np.zeros(0, np.int64), *(next(flat) for _ in parts)]) for parts in cut]
    return [np.concatenate([[first], body, last]).astype(np.int64) for body in bodies]


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Iterator[np.ndarray]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:  # uses all cores and skips the wrapper's overhead
        return (
            np.array(part.ids, dtype=np.int64) for part in backend.encode_batch_fast(texts, add_special_tokens=False)
        )
    parts = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    return (np.array(part, dtype=np.int64) for part in parts)


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """The text in parts of about ``size`` characters, cut before a space between words where there is one.

    Byte-level tokenizers pre-tokenise a word together with the space before it, so such a cut changes no token.
    """
    start = 0
    while len(text) - start > size:
        cut = cut_point(text, start, start + size)
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def cut_point(text: str, start: int, end: int) -> int:
    """The index of the last single space between two words in ``text[start:end]``; ``end`` if there is none."""
    at = text.rfind(" ", start + 1, end - 1)
    while at > start:
        if not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
        at = text.rfind(" ", start + 1, at)
    return end


def check_fits(tokenizer: PreTrainedTokenizerBase, vocab_size: int, model: str) -> None:
    """Compare a tokenizer with the size of a model's vocabulary.

    Raises:
        UserError: it has more tokens than the model.
    """
    if len(tokenizer) > vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens but {model} knows {vocab_size}: it belongs to another model"
        )


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    tokenizer.save_pretrained(folder)


def _wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _byte_symbol(byte: int) -> str:
    """The printable character that stands for a byte in byte-level tokenizers."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    if byte in printable:
        return chr(byte)
    return chr(256 + byte - sum(1 for other in printable if other < byte))
