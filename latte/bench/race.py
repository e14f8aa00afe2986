"""The race with llama.cpp: the same GGUF file, the same tokens, in turns, as many threads.

SmolLM2 extended (window and latents around the file's blocks) and as it is (softmax attention to everything), both in
our engine; and a Transformer of ours beside its own export.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import torch

from latte.bench.export import write_gguf
from latte.bench.figures import Figure, Plan
from latte.bench.harness import Skipped
from latte.bench.llama_cpp import LlamaCpp
from latte.bench.sizes import TRANSFORMER, Size
from latte.errors import UserError
from latte.loading import extended_model, load_any, quantize_new, read_gguf, smollm2_file
from latte.models import LatteCache
from latte.recipe import ExtendRecipe

EXTENDED, ORIGINAL, PEER = "extended", "original", "llama.cpp"
EXPORTED, PEER_EXPORTED = f"{TRANSFORMER} Q8_0", f"llama.cpp, {TRANSFORMER} Q8_0"
NEAR = 1024  # the context behind which the exported Transformer writes
TOKENS = 8  # written in a turn
CHUNK = 1024  # tokens that ours reads at once


class Racer(Protocol):
    """Reads a context from its first token, and writes behind it."""

    def read(self, tokens: Sequence[int]) -> float: ...

    def write(self, token: int, count: int) -> list[float]: ...


class Ours:
    """A model in our engine."""

    def __init__(self, model: Any) -> None:
        self.model, self.cache = model.eval().requires_grad_(False), LatteCache()
        refusal = model.decode_refusal()
        if refusal is not None:
            raise Skipped(f"the decode engine does not serve it: {refusal}")

    @torch.no_grad()
    def read(self, tokens: Sequence[int]) -> float:
        ids_BT = torch.tensor([tokens])
        cache: Any = None
        start = time.perf_counter()
        for part_BT in ids_BT.split(CHUNK, dim=1):
            cache = self.model(part_BT, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
        seconds = time.perf_counter() - start
        self.cache = cache
        self.cache.history = TOKENS
        return seconds

    @torch.no_grad()
    def write(self, token: int, count: int) -> list[float]:
        seconds, token_BT = [], torch.tensor([[token]])
        for _ in range(count):
            start = time.perf_counter()
            logits = self.model(input_ids=token_BT, past_key_values=self.cache, use_cache=True).logits
            token_BT = logits[:, -1:].argmax(-1)
            seconds.append(time.perf_counter() - start)
        if not self.cache.take_back(count):
            raise RuntimeError("the decode engine can't take back its tokens")
        return seconds


def run(plan: Plan, size: Size, model: str = "", quick: bool = False) -> list[Figure]:
    """Reading and writing behind every context of the plan.

    Args:
        model: a GGUF file of Llama's architecture; by default SmolLM2-135M's, or a small one in a quick run.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        exported = Path(folder) / "transformer.Q8_0.gguf"
        ours = size.model(TRANSFORMER).eval().quantize("int8")
        write_gguf(ours, exported)
        try:
            file = Path(model) if model else exported if quick else smollm2_file(plan.say)
        except UserError as error:
            plan.say(f"the race is left out: {error}")
            return []
        extended = extended_model(read_gguf(file), _options())
        quantize_new(extended)
        racers: dict[str, Racer] = {
            EXTENDED: Ours(extended),
            ORIGINAL: Ours(load_any(str(file))[0]),
        }
        _join(racers, PEER, file, max(plan.lengths), plan, stack)
        figures = [figure for context in plan.lengths for figure in _turns(racers, context, plan)]
        racers = {EXPORTED: Ours(ours)}
        _join(racers, PEER_EXPORTED, exported, NEAR, plan, stack)
        return figures + _turns(racers, min(NEAR, max(plan.lengths)), plan)


def _join(racers: dict[str, Racer], name: str, file: Path, context: int, plan: Plan, stack: ExitStack) -> None:
    try:
        peer = LlamaCpp(file.resolve(), context + 4 * TOKENS, plan.threads)
    except Skipped as reason:
        plan.say(str(reason))
        return
    stack.callback(peer.close)
    racers[name] = peer


def _turns(racers: dict[str, Racer], context: int, plan: Plan) -> list[Figure]:
    """One context: everybody reads it, in turns, and then writes behind it, in turns."""
    tokens = [(index * 7919 + 13) % 64 for index in range(context)]
    reading: dict[str, list[float]] = {name: [] for name in racers}
    writing: dict[str, list[float]] = {name: [] for name in racers}
    for turn in range(3):
        for name, racer in racers.items():
            if turn == 0 or sum(reading[name]) < plan.budget:  # reading far takes many seconds
                reading[name].append(racer.read(tokens))
    for turn in range(1 + plan.repeats):
        for name, racer in racers.items():
            time.sleep(0.005)  # threads that still wait for work go to sleep
            seconds = racer.write(5, TOKENS)
            writing[name] += seconds if turn else []
    figures = []
    for name in racers:
        ours = isinstance(racers[name], Ours)
        for kind, seconds in (("read", reading[name]), ("write", writing[name])):
            best, median = min(seconds), statistics.median(seconds)
            extra = {"tokens_per_second": context / best} if kind == "read" else {}
            figures.append(Figure("race", kind, name, context, ours, best, median, len(seconds), extra=extra))
        read, write = figures[-2:]
        plan.say(
            f"race {context:>6} {name:<28} reads {read.extra['tokens_per_second']:6.0f} tokens/s, "
            f"writes {1e3 * (write.best or 0):6.2f} ms a token (median {1e3 * (write.median or 0):.2f})"
        )
    return figures


def _options() -> dict[str, Any]:
    from latte.workflows.extension import mixer_options

    return mixer_options(ExtendRecipe())
