"""``latte bench``: speed and memory beside peers, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from jsonargparse import ArgumentParser
from rich.console import Console

NEEDS = "latte.bench"


def read(arguments: Sequence[str]) -> Callable[[], int]:
    parser = ArgumentParser(
        prog="latte bench",
        description="Time ops, layers, models and decoding against peers on this CPU, in turns, and write the figures, "
        "plots and a summary.",
    )
    parser.add_argument(
        "--suite", type=str, default="all", help="ops, layers, models, decode, memory, allocator, registry or all"
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=None, help="tokens; default: the suite's own lengths")
    parser.add_argument("--quick", action="store_true", help="small and short: to see that everything runs")
    parser.add_argument("--out", type=str, default="docs/results/bench", help="folder for the results")
    settings = parser.parse_args(arguments)
    return partial(run, settings.suite, settings.lengths, settings.quick, settings.out)


def run(suite: str = "all", lengths: Sequence[int] | None = None, quick: bool = False, out: str = "bench") -> int:
    """Measure, print the figures as they come, and write them."""
    from latte.bench import run as measure

    console = Console()
    measure(suite, lengths, quick=quick, out=out, say=lambda line: console.print(line, highlight=False, markup=False))
    return 0
