"""Timing itself, with a clock that the test winds."""

import gc

import pytest

from latte.bench.figures import Contender, Plan, refuse, sweep
from latte.bench.harness import Seconds, Skipped, Timing, interleave
from latte.bench.machine import Peaks


class World:
    """A clock, and calls that take as long on it as they are told to."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def call(self, name, *seconds):
        times = list(seconds)

        def run():
            self.calls.append(name)
            self.now += times.pop(0) if len(times) > 1 else times[0]

        return run

    def interleave(self, calls, **options):
        return interleave(calls, clock=lambda: self.now, pause=lambda: None, **options)


def test_calls_take_turns_and_the_first_turn_only_warms_up():
    world = World()
    calls = {"a": world.call("a", 9.0, 3.0, 1.0, 2.0), "b": world.call("b", 5.0, 4.0, 6.0, 8.0)}
    timings = world.interleave(calls, repeats=3, budget=100.0)
    turns = list(zip(world.calls[::2], world.calls[1::2], strict=True))
    assert len(turns) == 4
    assert set(turns) == {("a", "b"), ("b", "a")}, "each once a turn, and none always first"
    assert timings["a"].seconds == (3.0, 1.0, 2.0)
    assert (timings["a"].best, timings["a"].median) == (1.0, 2.0)
    assert (timings["b"].best, timings["b"].median) == (4.0, 6.0)


def test_a_slow_call_is_repeated_less_and_a_very_slow_one_is_measured_by_its_warm_up():
    world = World()
    calls = {
        "slow": world.call("slow", 1.0),
        "very slow": world.call("very slow", 7.0),
        "fast": world.call("fast", 0.1),
    }
    timings = world.interleave(calls, repeats=5, budget=2.5)
    assert timings["slow"].seconds == (1.0, 1.0)
    assert timings["very slow"].seconds == (7.0,)
    assert len(timings["fast"].seconds) == 5


def test_a_slow_call_can_be_timed_some_turns_at_least():
    world = World()
    timings = world.interleave({"slow": world.call("slow", 9.0, 7.0, 8.0)}, repeats=5, budget=1.0, at_least=2)
    assert timings["slow"].seconds == (7.0, 8.0)


def test_seconds_from_another_process_count_instead_of_the_clock():
    world = World()
    assert world.interleave({"there": lambda: Seconds(0.25)}, repeats=2)["there"] == Timing((0.25, 0.25))


def test_a_failing_call_gives_its_reason_and_the_others_go_on():
    def fails():
        raise RuntimeError("no kernel for this\nand a long story")

    timings = World().interleave({"bad": fails, "good": lambda: None}, repeats=1)
    assert isinstance(timings["bad"], Skipped)
    assert str(timings["bad"]) == "no kernel for this"
    assert isinstance(timings["good"], Timing)


def test_the_collector_rests_while_timing_and_comes_back():
    seen = []
    World().interleave({"a": lambda: seen.append(gc.isenabled())}, repeats=1)
    assert seen == [False, False]
    assert gc.isenabled()


def plan(**options):
    return Plan((1, 2), repeats=1, say=lambda line: None, **options)


def test_what_would_take_too_long_or_too_much_is_refused_with_a_reason():
    quadratic = Contender("q", lambda length: lambda: None, growth=2.0)
    refuse(quadratic, 2000, (1000, 1.0), plan(longest=4.0))
    with pytest.raises(Skipped, match="would take about 16 s, more than 4"):
        refuse(quadratic, 4000, (1000, 1.0), plan(longest=4.0))
    with pytest.raises(Skipped, match="GiB of memory"):
        refuse(Contender("m", lambda length: lambda: None, memory=lambda length: 1e18), 10, None, plan())


def test_a_sweep_reports_every_contender_at_every_length():
    def prepare(length):
        if length == 2:
            raise Skipped("not that one")
        return lambda: None

    works = Contender("works", lambda length: lambda: None, ours=True, flops=lambda length: 100.0 * length)
    figures = sweep("s", "k", [works, Contender("sometimes", prepare)], plan(), Peaks(1e9, 1e9))
    assert [(f.name, f.length, f.skipped) for f in figures] == [
        ("works", 1, None),
        ("sometimes", 1, None),
        ("works", 2, None),
        ("sometimes", 2, "not that one"),
    ]
    first = figures[0]
    assert first.share_of_matmul == pytest.approx(100.0 / first.best / 1e9)
    assert first.to_json()["ours"] is True
    assert "skipped" not in first.to_json()


def test_shares_are_of_the_faster_yardstick_at_that_length(monkeypatch):
    seconds = {"layer": 4.0, "slow": 8.0, "fast": 2.0}
    monkeypatch.setattr(
        "latte.bench.figures.interleave", lambda calls, **_: {name: Timing((seconds[name],)) for name in calls}
    )

    def contender(name, flops):
        return Contender(name, lambda length: lambda: None, flops=lambda length: flops * length)

    layer, yardsticks = contender("layer", 10.0), [contender("slow", 10.0), contender("fast", 8.0)]
    figures = sweep("layers", "forward", [layer], plan(), Peaks(1.0, 1.0), [3], yardsticks)
    assert [figure.name for figure in figures] == ["layer", "slow", "fast"]
    # The fast one does 4 a second and token, the layer 2.5.
    assert figures[0].share_of_matmul == 10.0 / 4.0 / (8.0 / 2.0)
