"""Timing several calls in one run: warmed up, taken in turns, reported by their minimum and median.

On a shared machine the same call takes two or three times as long from one minute to the next. Taken in turns
(A B C, B A C, ...) all calls see the same minutes, and minima of the same run can be divided by each other. The order
changes from turn to turn: what a call finds in the caches depends on the call before it, and behind another process
nothing is left.
"""

from __future__ import annotations

import contextlib
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

#: A call to be timed. It returns nothing of interest, or, if it ran in another process, the seconds it took there.
Call = Callable[[], object]


class Skipped(Exception):  # noqa: N818  (an outcome, not an error)
    """A measurement that is not made, and why."""


class Seconds(float):
    """The result of a call that was timed where it ran."""


@dataclass(frozen=True)
class Timing:
    """All times of one call, in seconds, in the order they were taken."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def interleave(
    calls: Mapping[str, Call],
    *,
    repeats: int = 5,
    budget: float = 2.0,
    at_least: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    pause: Callable[[], object] = lambda: time.sleep(0.005),
) -> dict[str, Timing | Skipped]:
    """Time every call ``repeats`` times, in turns, after one turn of warm-up; a failing call gives its reason.

    A call whose times add up to more than ``budget`` seconds is not repeated further, once it was timed ``at_least`` so
    often; one whose warm-up alone takes longer than that is measured by its warm-up. ``pause`` comes before each call,
    so that threads still waiting for work of the call before go to sleep first.
    """
    spent = dict.fromkeys(calls, 0.0)
    warm_ups: dict[str, float] = {}
    times: dict[str, list[float]] = {name: [] for name in calls}
    failed: dict[str, Skipped] = {}
    with _without_collector():
        for turn in range(repeats + 1):
            names = list(calls)
            random.Random(turn).shuffle(names)
            for name in names:
                call = calls[name]
                if name in failed or (spent[name] > budget and turn > at_least):
                    continue
                pause()
                start = clock()
                try:
                    result = call()
                except (RuntimeError, NotImplementedError, MemoryError, Skipped) as error:
                    failed[name] = Skipped(_reason(error))
                    continue
                took = float(result) if isinstance(result, Seconds) else clock() - start
                del result
                spent[name] += took
                if turn:
                    times[name].append(took)
                else:
                    warm_ups[name] = took
    return {name: failed.get(name) or Timing(tuple(times[name] or [warm_ups[name]])) for name in calls}


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) < 160 else text[:157] + "..."


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
