"""The most memory that this process has held, and who hands it out."""

from __future__ import annotations

import platform
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


_FASTER = ("tcmalloc", "jemalloc", "mimalloc")


def allocator() -> str:
    """The library that serves this process's memory, as far as can be seen."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        mapped = ""
    return allocator_among(mapped) or platform.libc_ver()[0] or platform.system()


def allocator_among(mapped: str) -> str | None:
    """Which of the well-known allocators stands in a list of mapped files."""
    return next((name for name in _FASTER if re.search(rf"/lib{name}[^/\s]*\.so", mapped)), None)


def returns_memory_early(name: str) -> bool:
    """Whether this allocator gives large tensors back to the system at once, to be cleared anew for every step."""
    return name == "glibc"
