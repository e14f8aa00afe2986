"""Peak memory is a process's own, whoever started it; and the allocator is known by its file."""

import subprocess
import sys

import numpy as np

import latte.memory

# The file alone: importing the package would load torch, which is not small.
CHILD = f"import runpy; print(runpy.run_path({latte.memory.__file__!r})['peak_memory']())"


def test_a_small_child_of_a_large_parent_is_small():
    ballast = np.ones(1 << 26, dtype=np.float64)  # half a gigabyte
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert ballast.sum() == 1 << 26
    assert int(child.stdout) < 200 << 20
    assert latte.memory.peak_memory() > 512 << 20


def test_a_preloaded_allocator_is_recognised():
    mapped = "7f00-7f01 r-xp 0 fe:00 1 /usr/lib/x86_64-linux-gnu/lib{}\n7f02-7f03 r-xp 0 fe:00 2 /usr/lib/libc.so.6\n"
    assert latte.memory.allocator_among(mapped.format("tcmalloc_minimal.so.4.5.10")) == "tcmalloc"
    assert latte.memory.allocator_among(mapped.format("jemalloc.so.2")) == "jemalloc"
    assert latte.memory.allocator_among(mapped.format("m.so.6")) is None
    assert latte.memory.returns_memory_early("glibc")
    assert not latte.memory.returns_memory_early("tcmalloc")
