"""The most memory that this process has held."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path


def peak_memory() -> int:
    """Peak of resident memory, in bytes.

    Linux hands ``ru_maxrss`` down from a process to those it starts, so a small child of a large parent seems large
    from its first moment: the kernel's own mark of this process is read where there is one.
    """
    try:
        found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
