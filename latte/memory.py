"""Memory of this process: its peak, the allocator, and whether the allocator keeps large blocks for the next tensor.

Imports nothing heavy: the command line calls it before it imports torch.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from pathlib import Path
from typing import NamedTuple

from latte.errors import UserError


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


_OTHERS = ("tcmalloc", "jemalloc", "mimalloc")


def allocator() -> str:
    """The library that serves this process's memory, as far as can be seen."""
    try:
        mapped = Path("/proc/self/maps").read_text()
    except OSError:
        mapped = ""
    return allocator_among(mapped) or platform.libc_ver()[0] or platform.system()


def allocator_among(mapped: str) -> str | None:
    """Which of the well-known allocators stands in a list of mapped files."""
    return next((name for name in _OTHERS if re.search(rf"/lib{name}[^/\s]*\.so", mapped)), None)


class Threshold(NamedTuple):
    """A threshold of glibc's malloc: its environment variable, its tunable, mallopt's parameter, and our value."""

    variable: str
    tunable: str
    parameter: int
    value: int


#: mallopt takes a C int. Blocks below 2 GiB come from the heap, and the heap is never trimmed (-1).
MMAP = Threshold("MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold", -3, 2**31 - 1)
TRIM = Threshold("MALLOC_TRIM_THRESHOLD_", "glibc.malloc.trim_threshold", -1, -1)
PAD = Threshold("MALLOC_TOP_PAD_", "glibc.malloc.top_pad", -2, 256 << 20)
#: The other way to keep blocks off mmap: no block may be mapped at all.
MMAP_MAX = Threshold("MALLOC_MMAP_MAX_", "glibc.malloc.mmap_max", -4, 0)
SWITCH = "LATTE_KEEP_MEMORY"

_kept = False


def keep_memory() -> bool:
    """Let glibc keep large blocks for the next tensor of their size; return whether it does so by this call.

    glibc returns every block above 32 MiB to the system when it is freed, and the system clears the pages of the next
    one: that takes longer than many an op that fills them. Kept blocks cost memory instead, since a hole in the heap is
    not always used. Nothing is done with another allocator, with ``LATTE_KEEP_MEMORY=0``, or where the environment says
    which blocks are mapped; of the other thresholds, those that the environment sets stay.

    Raises:
        UserError: ``LATTE_KEEP_MEMORY`` is neither 0 nor 1.
    """
    global _kept
    if not _wanted() or allocator() != "glibc" or _users_mapping() is not None:
        return False
    # Older versions of glibc refuse a threshold above 32 MiB, and never refuse to map nothing. The others come after:
    # setting one also stops glibc from raising this threshold by itself, and it would stay at 128 KiB.
    _kept = _mallopt(MMAP) or _mallopt(MMAP_MAX)
    if _kept:
        for threshold in (TRIM, PAD):
            if _in_environment(threshold) is None:
                _mallopt(threshold)
    return _kept


def return_memory() -> None:
    """Give the system what glibc keeps for later: between parts of a program that need different amounts."""
    if _kept:
        import ctypes

        ctypes.CDLL(None).malloc_trim(0)


def keeps_memory() -> bool:
    """Whether :func:`keep_memory` has taken effect in this process."""
    return _kept


def allocation() -> str:
    """Which allocator serves, and what it does with large blocks."""
    name = allocator()
    if name != "glibc":
        return name
    if _kept:
        return "glibc, large blocks kept"
    users = _users_mapping()
    if users is not None:
        return f"glibc, with {users} from the environment"
    reason = f"neither a command nor {__package__}.keep_memory() has changed that" if _wanted() else f"{SWITCH}=0"
    return f"glibc, large blocks returned at once: {reason}"


def _wanted() -> bool:
    value = os.environ.get(SWITCH, "1")
    if value not in ("0", "1"):
        raise UserError(f"{SWITCH} is {value!r}, expected 0 or 1")
    return value == "1"


def _users_mapping() -> str | None:
    """How the environment says which blocks are mapped, if it does."""
    return _in_environment(MMAP) or _in_environment(MMAP_MAX)


def _in_environment(threshold: Threshold) -> str | None:
    if threshold.variable in os.environ:
        return f"{threshold.variable}={os.environ[threshold.variable]}"
    tunables = os.environ.get("GLIBC_TUNABLES", "").split(":")
    return next((entry for entry in tunables if entry.startswith(f"{threshold.tunable}=")), None)


def _mallopt(threshold: Threshold) -> bool:
    """Whether glibc accepts our value."""
    import ctypes

    return ctypes.CDLL(None).mallopt(ctypes.c_int(threshold.parameter), ctypes.c_int(threshold.value)) == 1
