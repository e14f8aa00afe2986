"""Peak memory is a process's own, the allocator is known by its file, and glibc keeps large blocks if asked to."""

import os
import subprocess
import sys

import numpy as np
import pytest

import latte
from latte import doctor, memory

THRESHOLDS = (memory.MMAP, memory.TRIM, memory.PAD, memory.MMAP_MAX)
VARIABLES = {"LATTE_KEEP_MEMORY", "GLIBC_TUNABLES", *(threshold.variable for threshold in THRESHOLDS)}
# Without the package's own file, which imports torch: a process with torch is not small.
LIGHT = "import latte_cli; latte_cli.postpone('latte'); from latte import memory;"


def python(code: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), **variables}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    ).stdout


def test_a_small_child_of_a_large_parent_is_small():
    ballast = np.ones(1 << 26, dtype=np.float64)  # half a gigabyte
    child = python(f"{LIGHT} print(memory.peak_memory())")
    assert ballast.sum() == 1 << 26
    assert int(child) < 200 << 20
    assert memory.peak_memory() > 512 << 20


def test_a_preloaded_allocator_is_recognised():
    mapped = "7f00-7f01 r-xp 0 fe:00 1 /usr/lib/x86_64-linux-gnu/lib{}\n7f02-7f03 r-xp 0 fe:00 2 /usr/lib/libc.so.6\n"
    assert memory.allocator_among(mapped.format("tcmalloc_minimal.so.4.5.10")) == "tcmalloc"
    assert memory.allocator_among(mapped.format("jemalloc.so.2")) == "jemalloc"
    assert memory.allocator_among(mapped.format("m.so.6")) is None


@pytest.fixture
def mallopt(monkeypatch):
    """The thresholds that a call would set, on a machine with glibc and nothing in the environment."""
    asked, refused = [], set()

    def record(threshold):
        asked.append(threshold)
        return threshold not in refused

    monkeypatch.setattr(memory, "_mallopt", record)
    monkeypatch.setattr(memory, "_kept", False)
    monkeypatch.setattr(memory, "allocator", lambda: "glibc")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    record.asked, record.refused = asked, refused
    return record


def test_large_blocks_are_kept(mallopt):
    assert doctor.allocation().startswith("glibc, large blocks returned at once: ")
    assert latte.keep_memory()
    assert mallopt.asked == [memory.MMAP, memory.TRIM, memory.PAD]
    assert all(-(2**31) <= threshold.value < 2**31 for threshold in mallopt.asked), "mallopt takes a C int"
    assert memory.keeps_memory()
    assert doctor.allocation() == "glibc, large blocks kept"


def test_a_glibc_that_refuses_the_threshold_maps_nothing_at_all(mallopt):
    mallopt.refused.add(memory.MMAP)
    assert memory.keep_memory()
    assert mallopt.asked == [memory.MMAP, memory.MMAP_MAX, memory.TRIM, memory.PAD]


def test_where_both_are_refused_the_others_stay(mallopt):
    mallopt.refused |= {memory.MMAP, memory.MMAP_MAX}
    assert not memory.keep_memory()
    assert mallopt.asked == [memory.MMAP, memory.MMAP_MAX]
    assert doctor.allocation().startswith("glibc, large blocks returned at once: ")


def test_the_switch_turns_it_off(mallopt, monkeypatch):
    monkeypatch.setenv("LATTE_KEEP_MEMORY", "0")
    assert not memory.keep_memory()
    assert mallopt.asked == []
    assert doctor.allocation() == "glibc, large blocks returned at once: LATTE_KEEP_MEMORY=0"
    monkeypatch.setenv("LATTE_KEEP_MEMORY", "no")
    with pytest.raises(ValueError, match="LATTE_KEEP_MEMORY is 'no', expected 0 or 1"):
        memory.keep_memory()


@pytest.mark.parametrize("name", ["tcmalloc", "jemalloc", "mimalloc", "Darwin", "musl"])
def test_another_allocator_is_left_alone(mallopt, monkeypatch, name):
    monkeypatch.setattr(memory, "allocator", lambda: name)
    assert not memory.keep_memory()
    assert mallopt.asked == []
    assert doctor.allocation() == name


@pytest.mark.parametrize(
    ("variable", "value", "described"),
    [
        ("MALLOC_MMAP_THRESHOLD_", "1048576", "MALLOC_MMAP_THRESHOLD_=1048576"),
        ("MALLOC_MMAP_MAX_", "9", "MALLOC_MMAP_MAX_=9"),
        ("GLIBC_TUNABLES", "glibc.malloc.check=0:glibc.malloc.mmap_max=9", "glibc.malloc.mmap_max=9"),
    ],
)
def test_the_environment_decides_which_blocks_are_mapped(mallopt, monkeypatch, variable, value, described):
    monkeypatch.setenv(variable, value)
    assert not memory.keep_memory()
    assert mallopt.asked == []
    assert doctor.allocation() == f"glibc, with {described} from the environment"


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "1048576"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1048576")],
)
def test_other_thresholds_of_the_environment_stay(mallopt, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    assert memory.keep_memory()
    assert mallopt.asked == [memory.MMAP, memory.PAD]


# The heap is one range of addresses; a block that is mapped lies outside it, and is returned when it is freed.
WHERE = """
import ctypes, re
malloc = ctypes.CDLL(None).malloc
malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
block = malloc(64 << 20)
start, end = re.search(r"(\\w+)-(\\w+) .*\\[heap\\]", open("/proc/self/maps").read()).groups()
print(int(start, 16) <= block < int(end, 16))
"""


@pytest.mark.skipif(memory.allocator() != "glibc", reason="memory does not come from glibc")
def test_glibc_does_what_it_is_asked_to():
    code = f"{LIGHT} memory.keep_memory(){WHERE}"
    assert python(code) == "True\n"
    assert python(code, LATTE_KEEP_MEMORY="0") == "False\n"
    assert python(code, MALLOC_MMAP_THRESHOLD_=str(1 << 20)) == "False\n"


def test_every_command_keeps_memory_before_torch_is_imported():
    code = """
import sys, latte_cli
load = latte_cli.postpone("latte")
latte_cli.postpone = lambda package: load
from latte import memory
memory.keep_memory = lambda: print("keep", "torch" in sys.modules)
import latte.cli.doctor
latte.cli.doctor.run = lambda tokens: print("run", "torch" in sys.modules)
latte_cli.main(["doctor"])
"""
    assert python(code).splitlines() == ["keep False", "run True"]
