"""Speed of reading and decoding, and memory, by length of context, measured on this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from latte.eval.decode_timing import engine_of, time_tokens
from latte.eval.stream import state_bytes

#: Extremes first, so that a slow machine measures the ends of the curve at least.
LENGTHS = (256, 4096, 1024, 8192, 128, 2048, 512)


@dataclass(frozen=True)
class Cost:
    """At one length of context: tokens per second of one row, and the bytes of its state."""

    length: int
    read: float
    decode: float
    memory: int
    engine: str = ""  # what decoded: kernel or modules


def measure_cost(
    model: Any, lengths: tuple[int, ...] = LENGTHS, *, seconds: float = 10.0, steps: int = 8
) -> list[Cost]:
    """Time reading random tokens of each length, then decoding ``steps`` more. Stops early after ``seconds``.

    Lengths beyond a table of learned positions are skipped.
    """
    config = model.config
    if getattr(config, "position_embedding", "none") == "learned":
        lengths = tuple(length for length in lengths if length + steps <= config.max_position_embeddings)
    generator = torch.Generator().manual_seed(0)
    result: list[Cost] = []
    end = time.perf_counter() + seconds
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for turn, length in enumerate(lengths[:1] + lengths):  # the first is a warm-up
            ids = torch.randint(0, config.vocab_size, (1, length), generator=generator).to(model.device)
            reads: list[float] = []
            while len(reads) < 2 or (len(reads) < 6 and sum(reads) < 0.5):
                began = time.perf_counter()
                outputs = model(ids, use_cache=True, logits_to_keep=1)
                reads.append(time.perf_counter() - began)
            memory = state_bytes(outputs.past_key_values)
            times, cache = time_tokens(model, outputs.past_key_values, ids[:, -1:].expand(1, steps))
            if turn:
                # The fastest, since other processes on the machine only add time.
                result.append(
                    Cost(length, length / min(reads), 1 / sorted(times)[steps // 4], memory, engine_of(cache))
                )
            if time.perf_counter() > end:
                break
    model.train(was_training)
    return sorted(result, key=lambda cost: cost.length)
