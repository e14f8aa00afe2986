"""Peak memory of a training step, each in a fresh process: what it takes beyond the model, gradients included.

Every large tensor gets pages of its own, which the system takes back when the tensor goes: the environment asks for
that, and wins over what the commands set. Left to itself glibc keeps those below 32 MiB on a heap whose holes often fit
nothing that is asked for next: that adds up to a third, by luck, and is reported beside (``heap``). A command lets
glibc keep all of them, for speed (:mod:`latte.memory`): what it then takes is reported too (``kept``).
"""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys

from latte.bench.allocator import environment
from latte.bench.figures import Figure, Plan
from latte.bench.sizes import OURS, TRANSFORMER, Size
from latte.memory import MMAP, keep_memory, peak_memory


def run(plan: Plan, size: Size) -> list[Figure]:
    """Bytes at every length, for our model and the Transformer of its size."""
    figures = []
    for length in plan.lengths:
        for variant in (OURS, TRANSFORMER):
            figure = measure(variant, length, size, plan)
            figures.append(figure)
            plan.say(f"memory training {length:>7} {variant:<28}{describe(figure)}")
    return figures


def describe(figure: Figure) -> str:
    if figure.best is None:
        return f"skipped: {figure.skipped}"
    heap, kept = (figure.extra[name] / 2**20 for name in ("heap", "kept"))
    return f"{figure.best / 2**20:.0f} MiB, on glibc's heap {heap:.0f}, with large blocks kept {kept:.0f}"


def measure(variant: str, length: int, size: Size, plan: Plan) -> Figure:
    """One point: pages of its own for each large tensor, glibc's heap, and that of a command, each in a new process."""
    answers: dict[str, dict[str, int]] = {}
    pages_alone = {**environment(keep=False), MMAP.variable: str(1 << 20)}
    settings = {"pages": pages_alone, "heap": environment(keep=False), "kept": environment(keep=True)}
    for name, variables in settings.items():
        answer = _step(variant, length, size, plan.threads, variables)
        if isinstance(answer, str):
            return Figure("memory", "memory", variant, length, variant == OURS, skipped=answer)
        answers[name] = answer
    pages = answers["pages"]
    extra = {**pages, "heap": answers["heap"]["step"], "kept": answers["kept"]["step"]}
    return Figure("memory", "memory", variant, length, variant == OURS, best=pages["step"], repeats=1, extra=extra)


def _step(variant: str, length: int, size: Size, threads: int, variables: dict[str, str]) -> dict[str, int] | str:
    """What one training step took in a new process; or why there is no answer."""
    request = json.dumps({"variant": variant, "length": length, "size": dataclasses.asdict(size), "threads": threads})
    command = [sys.executable, "-m", "latte.bench.memory", request]
    result = subprocess.run(command, capture_output=True, text=True, env=variables)
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        return lines[-1] if lines else "killed, probably for lack of memory"
    return json.loads(result.stdout.splitlines()[-1])


def main(request: str) -> None:
    """Build the model, note the peak, train one step, print what that added."""
    asked = json.loads(request)
    keep_memory()
    import torch

    torch.set_num_threads(asked["threads"])
    model = Size(**asked["size"]).model(asked["variant"])
    ids = torch.randint(0, model.config.vocab_size, (1, asked["length"]))
    before = peak_memory()
    model(input_ids=ids, labels=ids).loss.backward()
    # A step so short that it fits into what building the model left counts as one page.
    print(json.dumps({"model": before, "step": max(peak_memory() - before, resource.getpagesize())}))


if __name__ == "__main__":
    main(sys.argv[1])
