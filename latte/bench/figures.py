"""Contenders, the figures they get, and the sweep over lengths that measures them together."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from latte.bench.harness import Call, Skipped, Timing, interleave
from latte.bench.machine import Peaks, available_memory
from latte.memory import return_memory


@dataclass(frozen=True)
class Contender:
    """Something that can be timed at many lengths.

    ``prepare(length)`` makes the call to be timed, or raises Skipped. ``growth`` is the power of the length that time
    grows with; ``memory`` estimates the bytes a call needs; ``flops`` and ``bytes`` are what it has to do and read.
    """

    name: str
    prepare: Callable[[int], Call]
    ours: bool = False
    growth: float = 1.0
    memory: Callable[[int], float] = lambda length: 0.0
    flops: Callable[[int], float] | None = None
    bytes: Callable[[int], float] | None = None
    setup: float = 0.0  # seconds that preparing takes about: compilation


@dataclass(frozen=True)
class Figure:
    """One measurement, or why there is none."""

    suite: str
    kind: str  # forward, training, decode, memory, share
    name: str
    length: int
    ours: bool = False
    best: float | None = None  # seconds, or bytes for memory
    median: float | None = None
    repeats: int = 0
    share_of_matmul: float | None = None
    share_of_bandwidth: float | None = None
    skipped: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value not in (None, {})}


@dataclass(frozen=True)
class Plan:
    """How long a run may take: repeats, seconds for those of one call (``at_least`` so many are made all the same),
    seconds of the longest call, and the share of free memory one call may need."""

    lengths: Sequence[int]
    repeats: int = 5
    budget: float = 2.0
    at_least: int = 0
    longest: float = 12.0
    memory_share: float = 0.5
    threads: int = 1
    say: Callable[[str], None] = print


def sweep(
    suite: str,
    kind: str,
    contenders: Iterable[Contender],
    plan: Plan,
    peaks: Peaks,
    lengths: Sequence[int] = (),
    yardsticks: Sequence[Contender] = (),
) -> list[Figure]:
    """Time all contenders at every length, in turns; one that would take too long or too much is left out, with why.

    Shares of what the machine can do at most are shares of ``peaks``, or where there are ``yardsticks`` (calls that do
    nothing else, about as long) of the fastest at that length that is not ours: taken in turns with the rest, they see
    the machine as fast or slow as it is then.
    """
    contenders = [*contenders, *yardsticks]
    last: dict[str, tuple[int, float]] = {}
    figures: list[Figure] = []
    for length in lengths or plan.lengths:
        calls: dict[str, Call] = {}
        reasons: dict[str, str] = {}
        for contender in contenders:
            try:
                refuse(contender, length, last.get(contender.name), plan)
                calls[contender.name] = contender.prepare(length)
            except (Skipped, ImportError, RuntimeError) as error:
                reasons[contender.name] = str(error).splitlines()[0]
        timings = interleave(calls, repeats=plan.repeats, budget=plan.budget, at_least=plan.at_least)
        calls.clear()
        gc.collect()
        return_memory()  # else what one length kept would be missing at the next
        here = _peaks_of(yardsticks, timings, length, peaks)
        for contender in contenders:
            timing = timings.get(contender.name)
            if isinstance(timing, Timing):
                last[contender.name] = (length, timing.best)
                figures.append(_figure(suite, kind, contender, length, timing, here))
                plan.say(f"{suite} {kind} {length:>7} {contender.name:<28}{timing.best * 1e3:12.2f} ms")
            else:
                reason = str(timing) if isinstance(timing, Skipped) else reasons[contender.name]
                figures.append(Figure(suite, kind, contender.name, length, contender.ours, skipped=reason))
                plan.say(f"{suite} {kind} {length:>7} {contender.name:<28}     skipped: {reason}")
    return figures


def _peaks_of(
    yardsticks: Sequence[Contender], timings: Mapping[str, Timing | Skipped], length: int, otherwise: Peaks
) -> Peaks:
    products, reads = [], []
    for yardstick in yardsticks:
        timing = timings.get(yardstick.name)
        if yardstick.ours or not isinstance(timing, Timing):
            continue
        if yardstick.flops is not None:
            products.append(yardstick.flops(length) / timing.best)
        if yardstick.bytes is not None:
            reads.append(yardstick.bytes(length) / timing.best)
    return Peaks(max(products, default=otherwise.matmul_flops), max(reads, default=otherwise.read_bytes))


def refuse(contender: Contender, length: int, last: tuple[int, float] | None, plan: Plan) -> None:
    """Raise Skipped where a call would take longer than the plan allows, judged by its last one, or more memory."""
    if last is not None:
        expected = last[1] * (length / last[0]) ** contender.growth
        if expected > plan.longest:
            raise Skipped(f"would take about {expected:.0f} s, more than {plan.longest:.0f}")
    needed, free = contender.memory(length), available_memory() * plan.memory_share
    if needed > free:
        raise Skipped(f"would need about {needed / 2**30:.1f} GiB of memory, more than {free / 2**30:.1f}")


def _figure(suite: str, kind: str, contender: Contender, length: int, timing: Timing, peaks: Peaks) -> Figure:
    flops, data = contender.flops, contender.bytes
    return Figure(
        suite,
        kind,
        contender.name,
        length,
        contender.ours,
        timing.best,
        timing.median,
        len(timing.seconds),
        None if flops is None else flops(length) / timing.best / peaks.matmul_flops,
        None if data is None else data(length) / timing.best / peaks.read_bytes,
    )
