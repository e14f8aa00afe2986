"""The tokenizer in a GGUF file: byte-level BPE is built from its lists, others are read by transformers."""

from __future__ import annotations

import tempfile
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from latte.data.tokenizer import load_tokenizer
from latte.errors import UserError, reason
from latte.loading.gguf import GgufFile
from latte.loading.models import quiet

# Pre-tokenizers of GGUF that split digits. transformers reads them as GPT-2's, which gives other ids than the model was
# trained on wherever a digit follows white space.
ALONE_DIGITS = ("smollm", "starcoder", "refact", "command-r")
CONTROL, USER_DEFINED = 3, 4  # types of tokens
ENDS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def gguf_tokenizer(file: GgufFile) -> PreTrainedTokenizerBase:
    """The tokenizer of a file; transformers' conversion takes seconds, so the common kind is built here.

    Raises:
        UserError: there is none that can be used.
    """
    about = file.about
    direct = about.get("tokenizer.ggml.model") == "gpt2" and about.get("tokenizer.ggml.pre") in ALONE_DIGITS
    try:
        made = _byte_level(about) if direct and not adds_bos(about) else _converted(file)
    except UserError:
        raise
    except Exception as error:  # tokenizers raises nothing more special
        raise UserError(f"there is no usable tokenizer in {file.path}: {reason(error)}") from error
    if made.chat_template is None:
        made.chat_template = about.get("tokenizer.chat_template")
    made.name_or_path = str(file.path)
    return made


def adds_bos(about: dict[str, Any]) -> bool:
    """Whether every text begins with a token of its own."""
    return bool(about.get("tokenizer.ggml.add_bos_token", about.get("tokenizer.ggml.model") == "llama"))


def split_digits(tokenizer: PreTrainedTokenizerBase, about: dict[str, Any]) -> None:
    """Make a tokenizer that transformers has read cut texts as its model's was trained to."""
    if about.get("tokenizer.ggml.pre") in ALONE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = _digits_alone()


def _converted(file: GgufFile) -> PreTrainedTokenizerBase:
    # From an empty folder: transformers would prefer a tokenizer.json in the file's own folder.
    with tempfile.TemporaryDirectory() as empty, quiet():
        settings = {"gguf_file": str(file.path.resolve()), "add_bos_token": adds_bos(file.about)}
        tokenizer = load_tokenizer(empty, source=file.path, **settings)
    split_digits(tokenizer, file.about)
    return tokenizer


def _byte_level(about: dict[str, Any]) -> PreTrainedTokenizerBase:
    words: list[str] = about["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in about.get("tokenizer.ggml.merges", [])]
    backend = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    backend.pre_tokenizer, backend.decoder = _digits_alone(), decoders.ByteLevel()
    kinds = about.get("tokenizer.ggml.token_type", [])
    for kind, add in ((CONTROL, backend.add_special_tokens), (USER_DEFINED, backend.add_tokens)):
        add([AddedToken(word, normalized=False) for word, found in zip(words, kinds, strict=False) if found == kind])
    given = {name: about.get(f"tokenizer.ggml.{key}_token_id") for name, key in ENDS.items()}
    ends = {f"{name}_token": words[index] for name, index in given.items() if index is not None and index < len(words)}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **ends)


def _digits_alone() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
