"""Which mixers have stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from latte.decode.program import Builder
from latte.models.engine import Mixing


class Out(NamedTuple):
    """Where a sublayer's output goes: to an activation, or added to it."""

    y: str
    added: bool


#: Appends the stages of a mixer's token to a program: they read an activation, the normed input. Raises Unfit.
Describe = Callable[[Builder, Mixing, str, Out], None]
STAGES: dict[str, Describe] = {}


def stages_of(*names: str) -> Callable[[Describe], Describe]:
    """Decorator: the stages of the mixers of these names."""

    def register(describe: Describe) -> Describe:
        STAGES.update(dict.fromkeys(names, describe))
        return describe

    return register
