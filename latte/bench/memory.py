"""Peak memory of a training step, each in a fresh process: what it takes beyond the model, gradients included."""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys

from latte.bench.figures import Figure, Plan
from latte.bench.sizes import OURS, TRANSFORMER, Size
from latte.memory import peak_memory


def run(plan: Plan, size: Size) -> list[Figure]:
    """Bytes at every length, for our model and the Transformer of its size."""
    figures = []
    for length in plan.lengths:
        for variant in (OURS, TRANSFORMER):
            figure = measure(variant, length, size, plan)
            figures.append(figure)
            text = f"{figure.best / 2**20:12.1f} MiB" if figure.best is not None else f"skipped: {figure.skipped}"
            plan.say(f"memory training {length:>7} {variant:<28}{text}")
    return figures


def measure(variant: str, length: int, size: Size, plan: Plan) -> Figure:
    """One point, in its own process."""
    request = json.dumps(
        {"variant": variant, "length": length, "size": dataclasses.asdict(size), "threads": plan.threads}
    )
    result = subprocess.run([sys.executable, "-m", "latte.bench.memory", request], capture_output=True, text=True)
    ours = variant == OURS
    if result.returncode:
        lines = result.stderr.strip().splitlines()
        reason = lines[-1] if lines else "killed, probably for lack of memory"
        return Figure("memory", "memory", variant, length, ours, skipped=reason)
    answer = json.loads(result.stdout.splitlines()[-1])
    return Figure("memory", "memory", variant, length, ours, best=answer["step"], repeats=1, extra=answer)


def main(request: str) -> None:
    """Build the model, note the peak, train one step, print what that added."""
    asked = json.loads(request)
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
