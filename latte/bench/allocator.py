"""The same call in fresh processes, with large blocks kept by glibc as in every command, and with glibc's defaults.

By default a process is fast or slow by luck, for as long as it runs: whether the output of a call fits into memory that
is already mapped, or into pages that the system has to clear, depends on what was freed before. So one process says
little, and the figures are over the medians of several.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

from latte.bench import ops
from latte.bench.figures import Figure, Plan
from latte.memory import MMAP, MMAP_MAX, PAD, SWITCH, TRIM, allocator, keep_memory

KEPT, DEFAULT = "large blocks kept", "glibc's defaults"
PROCESSES, WARM_UPS, CALLS = 10, 3, 9


def environment(keep: bool) -> dict[str, str]:
    """This process's environment with one way of allocation, whatever the user has set."""
    users = {threshold.variable for threshold in (MMAP, TRIM, PAD, MMAP_MAX)} | {"GLIBC_TUNABLES"}
    kept = {name: value for name, value in os.environ.items() if name not in users}
    return {**kept, SWITCH: "1" if keep else "0"}


def run(plan: Plan, processes: int = PROCESSES) -> list[Figure]:
    """Causal Latte forward, in ``processes`` fresh processes of each kind, in turns."""
    figures = []
    for length in plan.lengths:
        times: dict[str, list[float]] = {KEPT: [], DEFAULT: []}
        reason = None if allocator() == "glibc" else f"memory comes from {allocator()}"
        for _ in range(0 if reason else processes):
            for name, seconds in times.items():
                answer = _in_new_process(length, plan.threads, environment(name == KEPT))
                if isinstance(answer, str):
                    reason = answer
                else:
                    seconds.append(answer)
        for name, seconds in times.items():
            figure = _figure(name, length, seconds, reason)
            figures.append(figure)
            plan.say(f"allocator forward {length:>7} {name:<28}{describe(figure)}")
    return figures


def describe(figure: Figure) -> str:
    if figure.best is None or figure.median is None:
        return f"skipped: {figure.skipped}"
    return f"median {figure.median * 1e3:.2f} ms, best {figure.best * 1e3:.2f} ms of {figure.repeats} processes"


def _figure(name: str, length: int, seconds: list[float], reason: str | None) -> Figure:
    if not seconds:
        return Figure("allocator", "forward", name, length, name == KEPT, skipped=reason)
    best, median = min(seconds), statistics.median(seconds)
    extra = {"processes": seconds}
    return Figure("allocator", "forward", name, length, name == KEPT, best, median, len(seconds), extra=extra)


def _in_new_process(length: int, threads: int, variables: dict[str, str]) -> float | str:
    """The median of the calls in a new process, in seconds; or why there is none."""
    command = [sys.executable, "-m", "latte.bench.allocator", json.dumps({"length": length, "threads": threads})]
    result = subprocess.run(command, capture_output=True, text=True, env=variables)
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        return lines[-1] if lines else "killed, probably for lack of memory"
    return float(result.stdout.splitlines()[-1])


def main(request: str) -> None:
    """Time the calls and print their median."""
    asked = json.loads(request)
    keep_memory()
    import torch

    torch.set_num_threads(asked["threads"])
    call = ops.prepared(ops._latte, asked["length"], (ops.LATENTS, ops.LATENTS, ops.WIDTH), training=False)
    seconds = []
    for _ in range(WARM_UPS + CALLS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    print(statistics.median(seconds[WARM_UPS:]))


if __name__ == "__main__":
    main(sys.argv[1])
