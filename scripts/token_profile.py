"""Where the time of one written token goes: the kernels, and the Python around them.

    python scripts/token_profile.py [--tokens 400] [--context 1024] [--model runs/mine] [--out token.json]

The benchmark's model writes at batch 1: the model alone, always its most probable token. With --model, a run, a model
or a GGUF file (extended by untrained latents), the loop of ``latte generate`` is profiled, with sampling, and with its
text written to a pipe. Every part is a mean without its slowest quarter: the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from latte.bench.sizes import OURS, STANDARD
from latte.decode.guard import Guard
from latte.decode.memory import SessionMemory
from latte.eval import generate as eval_generate
from latte.eval.generate import Reader, stream_text
from latte.loading import extended_model, load_any, quantize_new, read_gguf
from latte.models import LatteCache
from latte.ops import native
from latte.ops.native import library
from latte.recipe import ExtendRecipe, GenerateRecipe
from latte.workflows.extension import mixer_options

times: dict[str, list[float]] = defaultdict(list)


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, noting how long each call takes."""

    def call(*given: Any, **named: Any) -> Any:
        start = time.perf_counter()
        result = function(*given, **named)
        times[name].append(time.perf_counter() - start)
        return result

    return call


def write(model: Any, cache: LatteCache, tokens: int) -> None:
    token = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(tokens):
        token = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)


def read_model(name: str) -> tuple[Any, Any]:
    """A model, a GGUF file's extended, and its tokenizer."""
    model, tokenizer = load_any(name)
    if Path(name).is_file():
        model = extended_model(read_gguf(Path(name)), mixer_options(ExtendRecipe()))
        quantize_new(model)
    return model.eval().requires_grad_(False), tokenizer


def generate(name: str, context: int, tokens: int) -> None:
    """Time ``tokens`` tokens as ``latte generate`` writes them, their text written to a pipe."""
    model, tokenizer = read_model(name)
    reader = Reader(model, tokenizer)
    reader.read_ids([5 + index % 50 for index in range(context)])
    recipe = GenerateRecipe(model=name, max_new_tokens=tokens, stop_at_end=False)
    eval_generate.choose = timed("choice of the token", eval_generate.choose)
    type(tokenizer).decode = timed("text of the tokens", type(tokenizer).decode)
    read_end, write_end = os.pipe()
    with open(read_end, "rb", buffering=0) as received, open(write_end, "w", encoding="utf-8") as pipe:
        before = time.perf_counter()
        for piece in stream_text(reader, recipe):
            pipe.write(piece)
            pipe.flush()
            times["whole token"].append(time.perf_counter() - before)
            received.read(1 << 16)  # a full pipe would wait
            before = time.perf_counter()


def usual(values: list[float]) -> float:
    """Microseconds: the mean without the slowest quarter."""
    kept = sorted(values)[: max(1, len(values) * 3 // 4)]
    return 1e6 * sum(kept) / len(kept)


def watch_engine() -> None:
    """Time the engine's parts from now on."""
    Guard.holds = timed("check of modules and weights", Guard.holds)  # type: ignore[method-assign]
    SessionMemory.advance = timed("room for new states", SessionMemory.advance)  # type: ignore[method-assign]
    native.Call.run = timed("kernel", native.Call.run)  # type: ignore[method-assign]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--context", type=int, default=1024, help="tokens read before")
    parser.add_argument("--model", help="profile the loop of latte generate with this model")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file as well")
    args = parser.parse_args()
    if not library.available():
        parser.error(f"there is nothing to profile without the native kernels: {library.describe()}")
    if args.tokens < 4 or args.context < 1:
        parser.error(f"got {args.tokens} tokens behind {args.context}, expected at least 4 behind at least 1")
    known = ["kernel", "check of modules and weights", "room for new states"]
    if args.model is None:
        model, cache = STANDARD.model(OURS).eval().requires_grad_(False), LatteCache()
        ids = torch.randint(0, STANDARD.vocabulary, (1, args.context))
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        write(model, cache, 30)
        watch_engine()
        one = timed("whole token", lambda: write(model, cache, 1))
        for _ in range(args.tokens):
            one()
    else:
        watch_engine()
        generate(args.model, args.context, args.tokens)
        known += ["choice of the token", "text of the tokens"]

    figures = {name: round(usual(values)) for name, values in sorted(times.items())}
    figures["the rest"] = figures["whole token"] - sum(figures[name] for name in known)
    figures["outside the kernel"] = figures["whole token"] - figures["kernel"]
    for name, value in figures.items():
        print(f"{name:36}{value:8} us")
    if args.out is not None:
        args.out.write_text(json.dumps({"threads": torch.get_num_threads(), "microseconds": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
