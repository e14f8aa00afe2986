"""A whole run: the machine's peaks, then the suites that were asked for, then the files."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from latte.bench import allocator, bits, decode, layers, mechanisms, memory, models, ops, race, registry
from latte.bench.figures import Figure, Plan
from latte.bench.machine import Peaks, describe, measure_peaks
from latte.bench.results import write
from latte.bench.sizes import STANDARD, TINY, Size

#: Each suite with its usual lengths, and how many seconds one call of a peer may take.
SUITES: dict[str, tuple[tuple[int, ...], float]] = {
    "ops": ((512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072), 4.0),
    "layers": ((512, 1024, 4096, 16384, 65536, 131072), 15.0),
    "models": ((512, 1024, 2048, 4096, 16384, 65536), 400.0),
    "decode": ((1024, 4096, 16384, 65536, 131072), 30.0),
    "race": ((128, 1024, 4096, 7900), 60.0),
    "memory": ((1024, 2048, 4096, 8192), 60.0),
    "allocator": ((16384,), 60.0),
    "registry": ((1024, 4096), 10.0),
    "mechanisms": ((4096,), 60.0),
}
#: Not part of ``all``: its figures stand in the gallery of mechanisms, not beside the targets.
ALONE = ("mechanisms",)
QUICK_LENGTHS = {
    "ops": (512, 2048),
    "layers": (512, 1024),
    "models": (64, 128),
    "decode": (64, 256),
    "race": (16, 64),
    "memory": (64, 128),
    "allocator": (512,),
    "registry": (64,),
    "mechanisms": (64,),
}


def run(
    suite: str = "all",
    lengths: Sequence[int] | None = None,
    *,
    quick: bool = False,
    out: str | Path | None = "docs/results/bench",
    say: Callable[[str], None] = print,
    size: Size | None = None,
    model: str = "",
) -> list[Figure]:
    """Measure ``suite`` (or ``"all"``) at ``lengths`` and write the results to the folder ``out``, unless it is None.

    ``quick`` takes short lengths, few repeats and small models: to see that everything runs, not to quote. ``model`` is
    the GGUF file of the race, by default SmolLM2's.

    Raises:
        ValueError: an unknown suite, or lengths that are not positive.
    """
    chosen = _chosen(suite)
    if lengths is not None and (not lengths or min(lengths) < 1):
        raise ValueError(f"lengths are {list(lengths)}, expected one or more numbers of tokens, each at least 1")
    size = size or (TINY if quick else STANDARD)
    machine = describe()
    say(f"{machine['cpu']}, {machine['cores']} cores, kernels: {machine['kernels']}, load {machine['load_before']}")
    peaks = measure_peaks(repeats=2, size=512, megabytes=32) if quick else measure_peaks()
    say(f"matrix product {peaks.matmul_flops / 1e9:.0f} GFLOP/s, memory {peaks.read_bytes / 1e9:.1f} GB/s")
    figures: list[Figure] = []
    for name in chosen:
        usual, longest = SUITES[name]
        plan = Plan(
            tuple(sorted(lengths or (QUICK_LENGTHS[name] if quick else usual))),
            repeats=1 if quick else 7,
            budget=0.5 if quick else 1.5,
            longest=min(longest, 2.0) if quick else longest,
            threads=torch.get_num_threads(),
            say=say,
        )
        figures += _suite(name, plan, peaks, size, model)
    if out is not None:
        command = f"latte bench --suite {suite}" + (" --quick" if quick else "")
        command += f" --lengths {' '.join(map(str, lengths))}" if lengths else ""
        command += f" --model {Path(model).name}" if model else ""
        for path in write(Path(out), machine, peaks, figures, command):
            say(f"wrote {path}")
    return figures


def _suite(name: str, plan: Plan, peaks: Peaks, size: Size, model: str) -> list[Figure]:
    if name == "ops":
        return ops.run(replace(plan, repeats=3 * plan.repeats), peaks)  # short calls are disturbed most
    if name == "layers":
        # Shares of a peak: one call may fall into a slow moment of the machine.
        return layers.run(replace(plan, at_least=min(3, plan.repeats)), peaks, size)
    if name == "models":
        return models.run(plan, peaks, size)
    if name == "decode":
        # A token is short and the figure is a difference of two: more turns.
        more = replace(plan, repeats=2 * plan.repeats, budget=2 * plan.budget)
        return [*decode.run(more, peaks, size), *bits.run(more, peaks)]
    if name == "race":
        return race.run(replace(plan, repeats=2 * plan.repeats, budget=4 * plan.budget), size, model, size is TINY)
    if name == "memory":
        return memory.run(plan, size)
    if name == "registry":
        return registry.run(plan, peaks)
    if name == "mechanisms":
        return mechanisms.run(plan, peaks, "tiny" if size is TINY else "small")
    return allocator.run(plan, processes=2 if plan.repeats == 1 else allocator.PROCESSES)


def _chosen(suite: str) -> list[str]:
    if suite == "all":
        return [name for name in SUITES if name not in ALONE]
    if suite == "decode":
        return ["decode", "race"]
    if suite not in SUITES:
        known = [*SUITES, "all"]
        close = difflib.get_close_matches(suite, known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown suite {suite!r}{hint}, expected one of {', '.join(known)}")
    return [suite]
