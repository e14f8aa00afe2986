"""What the first model of a comparison loses to others, and by how much, as sentences made from the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from latte.eval.comparison import Row
from latte.eval.stream import standard_error

#: A difference of losses of fewer standard errors than this is named apart.
CLEAR = 2.0


def verdict(rows: Sequence[Row]) -> str:
    """A Markdown section with a point for each figure; empty for a single model."""
    points = "".join(f"- **{title}** {text}\n" for title, text in losses_to_others(rows))
    return f"\n## Where {rows[0].name} loses\n\n{points}" if points else ""


def losses_to_others(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """For each figure of the first row, its name and a sentence about the rows ahead of it, the furthest first."""
    own, others = rows[0], rows[1:]
    if not others:
        return []
    longest = own.at_longest["context"]
    points: list[tuple[str, str] | None] = [
        _loss_point(own, others, "at_training", f"Loss at the trained length of {own.trained_context:,} tokens")
    ]
    if longest != own.trained_context:
        same = [row for row in others if row.at_longest["context"] == longest]
        points.append(_loss_point(own, same, "at_longest", f"Loss at {longest:,} tokens"))
    points.append(_ratio_point(own, others, "Training speed", "train_tokens_per_second", _per_second, higher=True))
    points.append(_ratio_point(own, others, "Writing speed", "decode_tokens_per_second", _per_second, higher=True))
    points.append(
        _ratio_point(own, others, "Writing speed by modules", "module_tokens_per_second", _per_second, higher=True)
    )
    points.append(_ratio_point(own, others, "State", "state_bytes", _kib, higher=False))
    points.append(_ratio_point(own, others, "Peak memory of training", "peak_memory_bytes", _mib, higher=False))
    return [point for point in points if point is not None]


def _loss_point(own: Row, others: Sequence[Row], at: str, title: str) -> tuple[str, str]:
    mine: dict[str, Any] = getattr(own, at)
    ahead = sorted(
        (getattr(row, at)["loss"] - mine["loss"], row.name, _error(mine, getattr(row, at)))
        for row in others
        if getattr(row, at)["loss"] < mine["loss"]
    )
    clear = [_by(*entry) for entry in ahead if entry[2] is None or -entry[0] > CLEAR * entry[2]]
    close = [_by(*entry) for entry in ahead if entry[2] is not None and -entry[0] <= CLEAR * entry[2]]
    text = f"({mine['loss']:.4f}, place {1 + len(ahead)} of {1 + len(others)}): "
    if not ahead:
        return title, f"{text}none is lower."
    text += f"lower are {', '.join(clear)}" if clear else "none is clearly lower"
    if close:
        text += f"; by less than {CLEAR:g} standard errors of the difference: {', '.join(close)}"
    return title, f"{text}."


def _by(difference: float, name: str, error: float | None) -> str:
    return f"{name} by {-difference:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _error(mine: dict[str, Any], other: dict[str, Any]) -> float | None:
    """Standard error of the difference of two losses of the same text, part by part."""
    pairs = zip(mine.get("parts") or [], other.get("parts") or [], strict=True)
    return standard_error([a - b for a, b in pairs])


def _ratio_point(
    own: Row, others: Sequence[Row], title: str, key: str, form: Callable[[float], str], *, higher: bool
) -> tuple[str, str] | None:
    mine = getattr(own, key)
    if not mine:
        return None
    found = [(getattr(row, key) / mine, row.name) for row in others if getattr(row, key)]
    ahead = [(ratio if higher else 1 / ratio, name) for ratio, name in found if (ratio > 1) == higher and ratio != 1]
    text = f"({form(mine)}, place {1 + len(ahead)} of {1 + len(found)}): "
    if not ahead:
        return title, f"{text}none is {'faster' if higher else 'smaller'}."
    named = ", ".join(f"{name} {ratio:.2f}" for ratio, name in sorted(ahead, reverse=True))
    return title, f"{text}times as {'fast' if higher else 'small'} are {named}."


def _per_second(value: float) -> str:
    return f"{value:,.0f} tokens/s"


def _kib(value: float) -> str:
    return f"{value / 1024:,.1f} KiB"


def _mib(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB"
