"""What the figures of a run say about the targets: one row for each, met or not, or not measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from latte.bench import allocator, decode, models, ops, race, yardsticks
from latte.bench.figures import Figure
from latte.bench.sizes import OURS, TRANSFORMER


@dataclass(frozen=True)
class Row:
    """A target and what was measured; ``met`` is None where this run has no figure for it."""

    point: str
    text: str
    measured: str
    target: str
    met: bool | None


class Figures:
    """Figures to look things up in."""

    def __init__(self, figures: Sequence[Figure]) -> None:
        self.all = figures
        self.by_key = {(f.suite, f.kind, f.name, f.length): f for f in figures if f.best is not None}

    def best(self, suite: str, kind: str, name: str, length: int) -> float | None:
        figure = self.by_key.get((suite, kind, name, length))
        return None if figure is None else figure.best

    def ratio(self, suite: str, kind: str, ours: str, theirs: str, length: int) -> float | None:
        """How many times as long theirs takes, each at its best."""
        mine, other = (self.best(suite, kind, name, length) for name in (ours, theirs))
        return None if mine is None or other is None else other / mine

    def usual_ratio(self, suite: str, kind: str, ours: str, theirs: str, length: int) -> float | None:
        """How many times as long theirs takes, each by its median; None where one was timed once."""
        pair = [self.by_key.get((suite, kind, name, length)) for name in (ours, theirs)]
        mine, other = (f.median if f is not None and f.repeats > 1 else None for f in pair)
        return None if mine is None or other is None else other / mine

    def of(self, suite: str, kind: str, name: str) -> list[Figure]:
        found = [f for f in self.by_key.values() if (f.suite, f.kind, f.name) == (suite, kind, name)]
        return sorted(found, key=lambda f: f.length)


def rows(figures: Sequence[Figure]) -> list[Row]:
    """Every numbered target that a run can check. The kernels' own correctness is for the tests to show."""
    look = Figures(figures)
    table = [
        _speed(look, "1", "causal Latte, T = 16384, forward", "ops", "forward", ops.LATTE, ops.LISTING, 16384, 6.0),
        _speed(look, "1", "causal Latte, T = 4096, with gradient", "ops", "training", ops.LATTE, ops.LISTING, 4096, 15),
        _speed(look, "2", "window 128, T = 4096, forward", "ops", "forward", ops.NEAR, ops.FLEX, 4096, 3.5),
        _speed(look, "2", "window 128, T = 16384, forward", "ops", "forward", ops.NEAR, ops.SDPA, 16384, 30.0),
        _speed(look, "2", "latents and window, T = 16384, forward", "ops", "forward", ops.BOTH, ops.SDPA, 16384, 22.0),
    ]
    shares = [f for f in look.of("layers", "share", OURS) if f.length >= 1024]
    table.append(
        _bound(
            "3",
            "largest share of mixing in a layer's forward pass",
            [(f.extra["share"], f.length) for f in shares],
            lambda values: max(values),
            lambda value: value <= 0.2,
            "at most 20% for every T from 1024",
            "{:.1%} at T = {}",
        )
    )
    layer = [f for f in look.of("layers", "forward", OURS) if f.length >= 1024 and f.share_of_matmul is not None]
    fastest = {f.length: f.share_of_matmul for f in look.of("layers", "forward", yardsticks.FASTEST)}
    of_fastest = [(f.share_of_matmul or 0.0) / own for f in layer if (own := fastest.get(f.length))]
    beside = f"; of the product that our layers call, {min(of_fastest):.0%}" if of_fastest else ""
    table.append(
        _bound(
            "3",
            "the layer's speed, share of the peak of torch's matrix product, at its slowest" + beside,
            [(f.share_of_matmul or 0.0, f.length) for f in layer],
            lambda values: min(values),
            lambda value: value >= 0.7,
            "at least 70% for every T from 1024",
            "{:.1%} at T = {}",
        )
    )
    trained = [f.length for f in look.of("models", "training", OURS) if f.length >= 2048]
    ratios = [(r, t) for t in trained if (r := look.ratio("models", "training", OURS, TRANSFORMER, t)) is not None]
    table += [
        _bound(
            "4",
            f"training, {TRANSFORMER}'s time over ours, at its smallest",
            ratios,
            lambda values: min(values),
            lambda value: value > 1.0,
            "above 1x from T = 2048",
            "{:.2f}x at T = {}",
        ),
        _speed(look, "4", "training, T = 16384", "models", "training", OURS, TRANSFORMER, 16384, 2.5),
        _speed(look, "4", "forward, T = 65536", "models", "forward", OURS, TRANSFORMER, 65536, 7.0),
    ]
    near, far = (look.best("decode", "decode", OURS, context) for context in (1024, 131072))
    growth = None if near is None or far is None else far / near - 1
    table.append(
        Row(
            "5",
            "decoding at context 131072 against 1024",
            "not measured" if growth is None else f"{growth:+.1%}",
            "at most +5%",
            None if growth is None else growth <= 0.05,
        )
    )
    reads = [f for f in look.of("decode", "decode", OURS) if f.share_of_bandwidth is not None]
    llama = look.best("decode", "decode", decode.LLAMA, 1024)
    beside = "" if llama is None or near is None else f"; Llama takes {llama / near:.2f}x as long at 1024"
    row = _bound(
        "5",
        "weights read at batch 1, share of memory bandwidth" + beside,
        [(f.share_of_bandwidth or 0.0, f.length) for f in reads],
        lambda values: max(values),
        lambda value: value >= 0.6,
        "at least 60%",
        "{:.1%} at context {}",
    )
    plain = [f.median for f in look.of("decode", "decode", yardsticks.SUM) if f.median is not None]
    usual = [plain[0] / f.median for f in reads if plain and f.median is not None]
    table.append(replace(row, measured=f"{row.measured} (medians: {max(usual):.1%})") if usual else row)
    memory = look.of("memory", "memory", OURS)
    doubled = [
        (b.best / a.best, b.length)
        for a in memory
        for b in memory
        if b.length == 2 * a.length and a.best and b.best and a.length >= 1024
    ]
    others = {f.length: f.best for f in look.of("memory", "memory", TRANSFORMER)}
    against = [
        (f.best / other, f.length)
        for f in memory
        if f.best is not None and f.length >= 2048 and (other := others.get(f.length))
    ]
    table += [
        _bound(
            "6",
            "peak memory of training when T doubles, at its largest",
            doubled,
            lambda values: max(values),
            lambda value: value <= 2.1,
            "at most 2.1x",
            "{:.2f}x to T = {}",
        ),
        _bound(
            "6",
            f"peak memory of training over {TRANSFORMER}'s, at its largest",
            against,
            lambda values: max(values),
            lambda value: value < 1.0,
            "below 1x from T = 2048",
            "{:.2f}x at T = {}",
        ),
        _fresh_processes(look),
        *(_reset_costs_nothing(look, variant) for variant in (OURS, TRANSFORMER)),
        *_race(look),
    ]
    return table


def _race(look: Figures) -> list[Row]:
    """Our engine and llama.cpp on the same file: the extended model, and a Transformer of the same bits."""
    contexts = [f.length for f in look.of("race", "write", race.EXTENDED)]
    writing = [(r, t) for t in contexts if (r := look.ratio("race", "write", race.EXTENDED, race.PEER, t)) is not None]
    exported = look.ratio("race", "write", race.PEER_EXPORTED, race.EXPORTED, race.NEAR)
    bits = [f for f in look.all if f.kind == "bits" and f.share_of_bandwidth is not None]
    return [
        _bound(
            "8",
            "writing, llama.cpp's best time over the extended model's, at its smallest",
            writing,
            lambda values: min(values),
            lambda value: value > 1.0,
            "above 1x at every context",
            "{:.2f}x at context {}",
        ),
        _speed(look, "8", "writing behind 7900 tokens", "race", "write", race.EXTENDED, race.PEER, 7900, 6.0),
        _speed(look, "8", "reading 4096 tokens", "race", "read", race.EXTENDED, race.PEER, 4096, 3.0),
        Row(
            "8",
            f"{race.EXPORTED}'s time over llama.cpp's on the same weights, context {race.NEAR}",
            "not measured" if exported is None else f"{exported:.2f}x",
            "at most 1.3x",
            None if exported is None else exported <= 1.3,
        ),
        _bound(
            "8",
            "weights of 32, 8 and 4 bits, share of plain reading, at its smallest",
            [(f.share_of_bandwidth or 0.0, f.length) for f in bits],
            lambda values: min(values),
            lambda value: value >= 0.6,
            "at least 60%",
            "{:.1%} at {} bits",
        ),
    ]


def _reset_costs_nothing(look: Figures, variant: str) -> Row:
    """A document start at a row's first token, which ``latte train`` always gives, against none."""
    found = [
        (given.median / plain.median, given.length)
        for given in look.of("models", "reset", variant)
        if given.median
        and (plain := look.by_key.get(("models", "reset", models.without_reset(variant), given.length)))
        and plain.median
    ]
    return _bound(
        "8",
        f"{variant}: a training step with reset at the first token over one without, medians, at its largest",
        found,
        lambda values: max(values),
        lambda value: value <= 1.05,
        "at most 1.05x",
        "{:.2f}x at T = {}",
    )


def _speed(
    look: Figures, point: str, text: str, suite: str, kind: str, ours: str, theirs: str, length: int, target: float
) -> Row:
    ratio = look.ratio(suite, kind, ours, theirs, length)
    usual = look.usual_ratio(suite, kind, ours, theirs, length)
    measured = "not measured" if ratio is None else f"{ratio:.1f}x" + (f" (medians: {usual:.1f}x)" if usual else "")
    met = None if ratio is None else ratio >= target
    return Row(point, f"{text}: against {theirs}", measured, f"at least {target:g}x", met)


def _fresh_processes(look: Figures) -> Row:
    """How far a usual process is from the fastest one."""
    text, target = "causal Latte, T = 16384, forward: the median of ten fresh processes over the best", "at most 1.3x"
    kept, default = (
        look.by_key.get(("allocator", "forward", name, 16384)) for name in (allocator.KEPT, allocator.DEFAULT)
    )
    if kept is None or kept.best is None or kept.median is None:
        return Row("7", text, "not measured", target, None)
    measured = f"{kept.median / kept.best:.2f}x"
    if default is not None and default.median is not None:
        measured += f" (with {allocator.DEFAULT}: {default.median / kept.best:.2f}x)"
    return Row("7", text, measured, target, kept.median <= 1.3 * kept.best)


def _bound(
    point: str,
    text: str,
    values: list[tuple[float, int]],
    worst: Callable[[list[tuple[float, int]]], tuple[float, int]],
    passes: Callable[[float], bool],
    target: str,
    form: str,
) -> Row:
    if not values:
        return Row(point, text, "not measured", target, None)
    value, length = worst(values)
    return Row(point, text, form.format(value, length), target, passes(value))
