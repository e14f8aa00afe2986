"""The machine a benchmark ran on: what it is, and what it can do at most, measured in the same run."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from latte.bench.harness import Skipped, Timing, interleave
from latte.memory import allocation
from latte.ops import native

PACKAGES = ("torch", "transformers", "numpy", "jax", "jaxlib", "mambapy")


@dataclass(frozen=True)
class Peaks:
    """The best this machine did in this run: float32 matrix products, and reading memory."""

    matmul_flops: float  # a second
    read_bytes: float  # a second


def describe() -> dict[str, str | int | float]:
    """Processor, cores, memory, kernels, versions and date."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "memory_bytes": total_memory(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "kernels": native.describe(),
        "allocator": allocation(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "load_before": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else -1.0,
    }


def measure_peaks(*, repeats: int = 7, size: int = 2048, megabytes: int = 256) -> Peaks:
    """The fastest of a square product and of one shaped like a layer's projection; and a sum over a large tensor."""
    square = torch.randn(size, size)
    tall, wide = torch.randn(4 * size, size // 4), torch.randn(size, size // 4)
    block = torch.ones(megabytes * 2**18)
    row = torch.randn(1, 2048)
    matrix = block[: block.numel() // 2048 * 2048].view(-1, 2048)
    with torch.no_grad():
        timings = interleave(
            {
                "square": lambda: square @ square,
                "tall": lambda: torch.nn.functional.linear(tall, wide),
                "sum": lambda: block.sum(),
                # What decoding does with weights: every number read once.
                "product": lambda: torch.nn.functional.linear(row, matrix),
            },
            repeats=repeats,
            budget=4.0,
        )
    best = {name: timing.best for name, timing in timings.items() if isinstance(timing, Timing)}
    if len(best) < len(timings):
        raise Skipped("the machine's peaks could not be measured")
    products = (2 * size**3 / best["square"], 2 * tall.numel() * size / best["tall"])
    reads = (block.numel() * 4 / best["sum"], matrix.numel() * 4 / best["product"])
    return Peaks(max(products), max(reads))


def available_memory() -> int:
    """Bytes that can be taken without swapping."""
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return total_memory()


def total_memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 8 * 2**30


def _cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.lower().startswith(("model name", "hardware")):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
