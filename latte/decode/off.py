"""Decoding without this room: for timings of modules beside the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from latte.models.engine import NoEngine


@contextmanager
def modules_only(model: nn.Module) -> Iterator[None]:
    """Inside, tokens are read by the model's modules and the ops' step forms: no engine."""
    owners: list[Any] = [module for module in model.modules() if "_engine" in vars(module)]
    engines = [owner._engine for owner in owners]
    for owner in owners:
        owner._engine = NoEngine(owner.anatomy)
    try:
        yield
    finally:
        for owner, engine in zip(owners, engines, strict=True):
            owner._engine = engine
