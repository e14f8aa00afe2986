"""Suites that start processes with one way of allocation or another: what each process gets, and what is written."""

import json

import pytest

from latte import bench, memory
from latte.bench import allocator
from latte.bench import memory as peak
from latte.bench.figures import Plan
from latte.bench.sizes import OURS, TINY


@pytest.fixture
def plan():
    return Plan((512,), repeats=1, say=lambda line: None)


@pytest.fixture(autouse=True)
def users(monkeypatch):
    """A user's own settings, which no measurement may depend on."""
    monkeypatch.setattr(allocator, "allocator", lambda: "glibc")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "5")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_max=5")


def allocation(variables):
    """What decides about large blocks in such a process."""
    names = ("LATTE_KEEP_MEMORY", "GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    return {name: variables[name] for name in names if name in variables}


def test_processes_take_turns_and_are_summed_up(plan, monkeypatch):
    seen, seconds = [], iter([0.02, 0.06, 0.03, 0.02, 0.04, 0.07])
    monkeypatch.setattr(
        allocator, "_in_new_process", lambda length, threads, variables: seen.append(variables) or next(seconds)
    )
    kept, default = allocator.run(plan, processes=3)
    assert [allocation(variables) for variables in seen] == [{"LATTE_KEEP_MEMORY": "1"}, {"LATTE_KEEP_MEMORY": "0"}] * 3
    assert (kept.name, kept.best, kept.median, kept.repeats) == (allocator.KEPT, 0.02, 0.03, 3)
    assert (default.name, default.best, default.median, default.ours) == (allocator.DEFAULT, 0.02, 0.06, False)
    assert default.extra == {"processes": [0.06, 0.02, 0.07]}
    assert allocator.describe(kept) == "median 30.00 ms, best 20.00 ms of 3 processes"


def test_another_allocator_has_nothing_to_compare(plan, monkeypatch):
    monkeypatch.setattr(allocator, "allocator", lambda: "tcmalloc")
    assert {figure.skipped for figure in allocator.run(plan)} == {"memory comes from tcmalloc"}


def test_a_process_that_fails_gives_its_reason(plan, monkeypatch):
    monkeypatch.setattr(allocator, "_in_new_process", lambda length, threads, variables: "out of memory")
    assert {figure.skipped for figure in allocator.run(plan, processes=1)} == {"out of memory"}


@pytest.mark.skipif(memory.allocator() != "glibc", reason="memory does not come from glibc")
def test_a_quick_run_is_written(tmp_path):
    bench.run("allocator", quick=True, out=tmp_path, say=lambda line: None)
    document = json.loads((tmp_path / "results.json").read_text())
    assert [(f["name"], f["repeats"]) for f in document["figures"]] == [(allocator.KEPT, 2), (allocator.DEFAULT, 2)]
    assert all(f["best"] > 0 for f in document["figures"])
    summary = (tmp_path / "summary.md").read_text()
    assert "## allocator: forward" in summary
    assert allocator.KEPT in summary
    assert "| 7 | causal Latte, T = 16384, forward" in summary


def test_peak_memory_is_taken_with_pages_alone_and_with_what_commands_hold(plan, monkeypatch):
    seen = []

    def step(variant, length, size, threads, variables):
        seen.append(allocation(variables))
        return {"model": 1, "step": 100 + len(seen)}

    monkeypatch.setattr(peak, "_step", step)
    figure = peak.measure(OURS, 512, TINY, plan)
    assert seen == [
        {"LATTE_KEEP_MEMORY": "0", "MALLOC_MMAP_THRESHOLD_": "1048576"},
        {"LATTE_KEEP_MEMORY": "0"},
        {"LATTE_KEEP_MEMORY": "1"},
    ]
    assert figure.best == 101
    assert (figure.extra["heap"], figure.extra["kept"]) == (102, 103)
