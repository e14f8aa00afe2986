"""Benchmarks against peers in one run: ops, layers, whole models, decoding and memory, on this machine's CPU.

:func:`run` measures and writes; ``latte bench`` is the same as a command.
"""

from latte.bench.run import SUITES, run

__all__ = ["SUITES", "run"]
