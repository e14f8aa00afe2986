"""Where the time of one written token goes: the kernels, and the Python around them.

    python scripts/token_profile.py [--tokens 400] [--context 1024] [--out token.json]

The benchmark's model writes at batch 1. Every part is a mean without its slowest quarter: the machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from latte.bench.sizes import OURS, STANDARD
from latte.decode.guard import Guard
from latte.decode.memory import SessionMemory
from latte.models import LatteCache
from latte.ops import native
from latte.ops.native import library

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


def usual(values: list[float]) -> float:
    """Microseconds: the mean without the slowest quarter."""
    kept = sorted(values)[: max(1, len(values) * 3 // 4)]
    return 1e6 * sum(kept) / len(kept)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--context", type=int, default=1024, help="tokens read before")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file as well")
    args = parser.parse_args()
    if not library.available():
        parser.error(f"there is nothing to profile without the native kernels: {library.describe()}")
    if args.tokens < 4 or args.context < 1:
        parser.error(f"got {args.tokens} tokens behind {args.context}, expected at least 4 behind at least 1")
    model, cache = STANDARD.model(OURS).eval().requires_grad_(False), LatteCache()
    ids = torch.randint(0, STANDARD.vocabulary, (1, args.context))
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    write(model, cache, 30)

    Guard.holds = timed("check of modules and weights", Guard.holds)  # type: ignore[method-assign]
    SessionMemory.advance = timed("room for new states", SessionMemory.advance)  # type: ignore[method-assign]
    native.Call.run = timed("kernel", native.Call.run)  # type: ignore[method-assign]
    one = timed("whole token", lambda: write(model, cache, 1))
    for _ in range(args.tokens):
        one()

    figures = {name: round(usual(values)) for name, values in sorted(times.items())}
    known = ("kernel", "check of modules and weights", "room for new states")
    figures["the rest"] = figures["whole token"] - sum(figures[name] for name in known)
    for name, value in figures.items():
        print(f"{name:36}{value:8} us")
    if args.out is not None:
        args.out.write_text(json.dumps({"threads": torch.get_num_threads(), "microseconds": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
