"""Peak memory is a process's own, whoever started it."""

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
