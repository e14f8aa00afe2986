"""Decoding without this room: for timings of mechanisms that the engine knows beside others that it does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from latte.mixers.base import TOKEN_STEPS
from latte.models.engine import NoEngine


@contextmanager
def modules_only(model: nn.Module) -> Iterator[None]:
    """Inside, tokens are read by the model's modules and the ops' step forms: no engine, no fused step of a layer.

    Fused steps are off for every model of the process meanwhile.
    """
    owners: list[Any] = [module for module in model.modules() if "_engine" in vars(module)]
    engines, steps = [owner._engine for owner in owners], dict(TOKEN_STEPS)
    TOKEN_STEPS.clear()
    for owner in owners:
        owner._engine = NoEngine(owner.anatomy)
    try:
        yield
    finally:
        TOKEN_STEPS.update(steps)
        for owner, engine in zip(owners, engines, strict=True):
            owner._engine = engine
