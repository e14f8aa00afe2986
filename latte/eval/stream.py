"""Evaluation by streaming: text of any length is read in chunks, and only the model's state is kept between them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from latte.errors import UserError

# Logits in memory at a time, about: 2^24 floats are 64 MB.
LOGITS_AT_ONCE = 1 << 24
TOKENS_AT_ONCE = 4096
# Parts of equal length that the scored text is divided into, for the standard error of its loss.
PARTS = 32


@dataclass(frozen=True)
class AtContext:
    """Loss of the same tokens when text is read in stretches of ``context`` tokens."""

    context: int
    tokens: int
    loss: float  # nats per token
    perplexity: float
    bits_per_byte: float
    tokens_per_second: float
    state_bytes: int  # of one row, at the end of the longest stretch
    parts: list[float] = field(default_factory=list)  # mean loss of each of up to 32 consecutive parts of the text
    standard_error: float | None = None  # of the loss, by the spread of its parts; None if there is one part


@dataclass(frozen=True)
class AtPosition:
    """Mean loss of the tokens that have ``first`` to ``last`` tokens before them."""

    first: int
    last: int
    tokens: int
    loss: float


@dataclass(frozen=True)
class Evaluation:
    """Quality by context length, and by position within the longest."""

    contexts: list[AtContext]
    positions: list[AtPosition]
    unreached: list[int] = field(default_factory=list)  # lengths asked for that no document has: not measured
    longest_document: int = 0  # tokens


@dataclass(frozen=True)
class Text:
    """Documents to score: their ids, and the number of bytes of their text."""

    documents: list[np.ndarray]
    num_bytes: int

    @property
    def longest(self) -> int:
        """Tokens of the longest document: no context beyond it can be measured."""
        return max(map(len, self.documents), default=0)


def evaluate(
    model: Any,
    text: Text,
    contexts: Sequence[int],
    *,
    chunk: int = 512,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """Score the same tokens at every context length: each document is read in stretches of that many tokens.

    A stretch starts from an empty state, so a token has at most ``context`` tokens before it. Every token but the first
    of each document is scored, whatever the length. Works for any causal model of transformers; with a recurrent one
    memory does not grow with the length. Contexts longer than every document would only repeat the figures of shorter
    ones: they are returned as ``unreached``.

    Args:
        chunk: tokens of a row read at once; changes nothing but speed and memory.
        on_tokens: called with the number of tokens of each chunk.

    Raises:
        UserError: no text, no context that a document reaches, or one that is not positive or beyond the model's
            learned positions.
    """
    if not any(len(document) > 1 for document in text.documents):
        raise UserError("there is no text to evaluate on")
    limit = longest_context(model)
    for context in contexts:
        if context < 1 or (limit is not None and context > limit):
            raise UserError(f"a context of {context} tokens was asked for, expected 1 to {limit or 'any number'}")
    reached = sorted({context for context in contexts if context <= text.longest})
    unreached = sorted({*contexts} - {*reached})
    if not reached:
        raise UserError(
            f"no document reaches a context of {unreached[0]:,} tokens, the longest has {text.longest:,}: give shorter "
            "--contexts, or --join_documents to read all documents as one"
        )
    measured, positions = [], []
    for context in reached:
        began = time.perf_counter()
        sums, counts, part_sums, part_counts, state_bytes = _score(model, text.documents, context, chunk, on_tokens)
        parts = part_sums / part_counts
        loss = float(sums.sum() / counts.sum())
        measured.append(
            AtContext(
                context=context,
                tokens=int(counts.sum()),
                loss=loss,
                perplexity=math.exp(min(loss, 700.0)),
                bits_per_byte=float(sums.sum()) / math.log(2) / max(1, text.num_bytes),
                tokens_per_second=int(counts.sum()) / (time.perf_counter() - began),
                state_bytes=state_bytes,
                parts=[round(float(part), 6) for part in parts],
                standard_error=standard_error(parts),
            )
        )
        positions = _positions(_edges(context), sums, counts)
    return Evaluation(measured, positions, unreached, text.longest)


def standard_error(parts: Sequence[float] | np.ndarray) -> float | None:
    """Standard error of the mean of as many independent figures; None if there is only one."""
    return float(np.std(parts, ddof=1) / math.sqrt(len(parts))) if len(parts) > 1 else None


def longest_context(model: Any) -> int | None:
    """The longest context of a model with learned positions; None if it reads any number of tokens."""
    config = model.config
    return config.max_position_embeddings if getattr(config, "position_embedding", None) == "learned" else None


def state_bytes(cache: Any) -> int:
    """Bytes of a cache of this project or of transformers."""
    if cache is None:
        return 0
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    tensors = [value for layer in getattr(cache, "layers", []) for value in vars(layer).values()]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


@torch.no_grad()
def _score(
    model: Any, documents: list[np.ndarray], context: int, chunk: int, on_tokens: Callable[[int], None]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """Sums of losses and numbers of tokens, by bin of position and by part of the text; the bytes of state per row."""
    edges = _edges(context)
    sums, counts = np.zeros(len(edges) - 1), np.zeros(len(edges) - 1, dtype=np.int64)
    scored = sum(max(0, len(document) - 1) for document in documents)
    part_sums, part_counts = np.zeros(min(PARTS, scored)), np.zeros(min(PARTS, scored), dtype=np.int64)
    model.eval()
    chunk = min(chunk, context)
    rows = max(1, min(TOKENS_AT_ONCE, LOGITS_AT_ONCE // model.config.vocab_size) // chunk)
    largest = 0
    for batch in _stretches(documents, context, rows):
        cache = None
        for start in range(0, len(batch[0].ids) - 1, chunk):
            # Rows are sorted by length, so the rows that have ended are the last ones: drop them.
            batch = [stretch for stretch in batch if len(stretch.ids) - 1 > start]
            if cache is not None:
                cache.batch_select_indices(torch.arange(len(batch), device=model.device))
            ids, targets = _chunk(batch, start, chunk)
            output = model(input_ids=ids.to(model.device), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            losses = F.cross_entropy(
                output.logits.flatten(0, 1).float(), targets.flatten().to(model.device), reduction="none"
            )
            losses_BT, real = losses.view(targets.shape).double().cpu().numpy(), (targets != -100).numpy()
            rows_N, columns_N = np.nonzero(real)
            place_N = np.searchsorted(edges, start + 1 + columns_N, side="right") - 1
            index_N = np.array([stretch.first for stretch in batch])[rows_N] + start + columns_N
            part_N = index_N * len(part_sums) // scored
            for where_N, total, number in ((place_N, sums, counts), (part_N, part_sums, part_counts)):
                np.add.at(total, where_N, losses_BT[real])
                np.add.at(number, where_N, 1)
            largest = max(largest, state_bytes(cache) // len(batch))
            on_tokens(int(real.sum()))
    return sums, counts, part_sums, part_counts, largest


class Stretch(NamedTuple):
    """Tokens that are read from an empty state, and the token after them."""

    first: int  # the number of its first target among all targets of the text
    ids: np.ndarray


def _stretches(documents: list[np.ndarray], context: int, rows: int) -> Iterator[list[Stretch]]:
    """Stretches of ``context`` tokens and the token after them, longest first, in batches."""
    cut: list[Stretch] = []
    before = 0
    for document in documents:
        for start in range(0, len(document) - 1, context):
            cut.append(Stretch(before + start, document[start : start + context + 1]))
        before += max(0, len(document) - 1)
    cut.sort(key=lambda stretch: len(stretch.ids), reverse=True)
    for start in range(0, len(cut), rows):
        yield cut[start : start + rows]


def _chunk(batch: list[Stretch], start: int, chunk: int) -> tuple[Tensor, Tensor]:
    """Ids and targets of a chunk; rows that end inside it are padded with id 0 and target -100."""
    width = min(chunk, len(batch[0].ids) - 1 - start)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    targets = torch.full((len(batch), width), -100)
    for row, stretch in enumerate(batch):
        piece = torch.from_numpy(stretch.ids[start : start + width + 1])
        ids[row, : len(piece) - 1] = piece[:-1]
        targets[row, : len(piece) - 1] = piece[1:]
    return ids, targets


def _edges(context: int) -> np.ndarray:
    """1, 2, 3, 4, 6, 8, 11, ...: two bins for each doubling; the last edge is beyond the context."""
    steps = np.arange(0, 2 * math.log2(context + 1) + 2)
    edges = np.unique(np.round(2 ** (steps / 2)).astype(np.int64))
    # A last bin of one or two positions would be mostly noise: merge it into the one before.
    return np.append(edges[(edges * 1.25 <= context) | (edges == 1)], context + 1)


def _positions(edges: np.ndarray, sums: np.ndarray, counts: np.ndarray) -> list[AtPosition]:
    return [
        AtPosition(int(first), int(after) - 1, int(count), float(total / count))
        for first, after, total, count in zip(edges[:-1], edges[1:], sums, counts, strict=True)
        if count
    ]
