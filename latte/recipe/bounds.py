"""The range of every number in a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from latte.errors import UserError


def check_numbers(
    settings: Any, least: Mapping[str, float], prefix: str = "", most: Mapping[str, float] | None = None
) -> None:
    """Compare the numbers of a recipe with their bounds; no number may be infinite.

    Args:
        least: lower bounds by name; a setting that is not named is at least 0, the elements of a list at least 1.
        prefix: of the names in messages.
        most: upper bounds by name.

    Raises:
        UserError: a number is out of bounds.
    """
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        listed = isinstance(value, list)
        low, high = least.get(entry.name, 1 if listed else 0), (most or {}).get(entry.name, math.inf)
        for number in value if listed else [value]:
            if isinstance(number, bool) or not isinstance(number, int | float):
                continue
            if not (low <= number <= high) or math.isinf(number):
                bounds = f"at least {low}" if math.isinf(high) else f"{low} to {high}"
                raise UserError(f"{prefix}{entry.name} is {value}, expected {bounds}")
