"""The models of a comparison: a recipe for each, and sizes that give all of them the same number of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from latte.errors import UserError
from latte.models import LatteConfig, LatteForCausalLM, preset, variants
from latte.models.presets import shared_overrides
from latte.recipe import CompareRecipe, Recipe

#: MLP widths and hidden sizes are multiples of it.
MULTIPLE = 8


def run_recipe(recipe: CompareRecipe, name: str = "", **changes: Any) -> Recipe:
    """The training recipe of one model of a comparison; ``changes`` replace settings."""
    shared = {entry.name: getattr(recipe, entry.name) for entry in fields(Recipe)}
    return Recipe(**{**shared, "out": str(Path(recipe.out) / name), **changes})


def plan(
    recipe: CompareRecipe, data_fields: dict[str, Any], kind: type[nn.Module] = LatteForCausalLM
) -> dict[str, Recipe]:
    """The training recipe of every model, with matched numbers of parameters if the recipe says so.

    Args:
        data_fields: fields of the configurations that the data determine, such as the vocabulary.
        kind: the model's class.

    Raises:
        UserError: an unknown name or setting, or a model that can't be matched.
    """
    models = {name: _model(name, recipe, data_fields, kind) for name in recipe.variants}
    # Counted in any case: a setting that a model does not take is found here, before the first training.
    counts = {name: model.count() for name, model in models.items()}
    if recipe.match_parameters:
        own = _model(recipe.match, recipe, data_fields, kind).count() if recipe.match else max(counts.values())
        models = {name: model.matched(own, recipe.match_within) for name, model in models.items()}
    return {
        name: run_recipe(recipe, name, model=replace(recipe.model, variant=model.variant, overrides=model.overrides))
        for name, model in models.items()
    }


def count_parameters(variant: str, overrides: dict[str, Any], size: str, extra: dict[str, Any]) -> int:
    """Number of a model's parameters, counted on the meta device, without allocating them."""
    return _Model(variant, variant, size, extra, overrides, LatteForCausalLM).count()


class _Model:
    """A variant with its overrides, and what it has in common with all others of the comparison."""

    def __init__(
        self,
        name: str,
        variant: str,
        size: str,
        extra: dict[str, Any],
        overrides: dict[str, Any],
        kind: type[nn.Module],
    ) -> None:
        self.name, self.variant, self.size, self.extra, self.overrides = name, variant, size, extra, overrides
        self.kind = kind

    def having(self, **overrides: int) -> _Model:
        return _Model(self.name, self.variant, self.size, self.extra, {**self.overrides, **overrides}, self.kind)

    def config(self) -> LatteConfig:
        try:
            return preset(self.variant, self.size, **{**self.extra, **self.overrides})
        except (ValueError, TypeError) as error:
            raise UserError(f"{self.name}: {error}") from error

    def count(self) -> int:
        config = self.config()
        try:
            with torch.device("meta"):
                model = self.kind(config)
        except (ValueError, TypeError) as error:
            raise UserError(f"{self.name}: {error}") from error
        return sum(parameter.numel() for parameter in model.parameters())

    def matched(self, target: int, within: float) -> _Model:
        """The first candidate with ``target`` parameters, up to a fraction of ``within``.

        Raises:
            UserError: there is none.
        """
        nearest, distance = self, abs(self.count() - target)
        for candidate in self._candidates(target):
            try:
                off = abs(candidate.count() - target)
            except UserError:
                continue  # heads that do not divide this hidden size
            if off <= within * target:
                return candidate
            if off < distance:
                nearest, distance = candidate, off
        raise UserError(
            f"{self.name}: no width of its MLP, number of layers or hidden size brings it within {within:.1%} of "
            f"{target:,} parameters, the nearest has {nearest.count():,}: give it other overrides, or a larger "
            "match_within"
        )

    def _candidates(self, target: int) -> Iterator[_Model]:
        """With MLPs, the nearest width of them at the preset's depth, then at fewer layers; otherwise the nearest
        numbers of layers at the preset's hidden size, then at others, the nearest first."""
        config = self.config()
        hidden, layers = config.hidden_size, config.num_hidden_layers
        if self._slope("intermediate_size", 64, 128):
            for depth in range(layers, 0, -1):
                model = self if depth == layers else self.having(num_hidden_layers=depth)
                width = MULTIPLE * round(model._solve("intermediate_size", 64, 128, target) / MULTIPLE)
                if width >= hidden:
                    yield model.having(intermediate_size=width)
        elif self._slope("num_hidden_layers", layers, layers + 1):
            nearby = range(MULTIPLE * -(-hidden // (2 * MULTIPLE)), 2 * hidden + 1, MULTIPLE)
            for size in sorted({hidden, *nearby}, key=lambda size: (abs(size - hidden), size)):
                model = self if size == hidden else self.having(hidden_size=size)
                try:
                    wanted = model._solve("num_hidden_layers", layers, layers + 1, target)
                except UserError:
                    continue
                for count in sorted({int(wanted), int(wanted) + 1}, key=lambda count: abs(count - wanted)):
                    if count >= 1:
                        yield model.having(num_hidden_layers=count)

    def _slope(self, setting: str, low: int, high: int) -> float:
        """Parameters for each more of a setting."""
        return (self.having(**{setting: high}).count() - self.having(**{setting: low}).count()) / (high - low)

    def _solve(self, setting: str, low: int, high: int, target: int) -> float:
        """The value with which the model has ``target`` parameters, which grow linearly with it."""
        return low + (target - self.having(**{setting: low}).count()) / self._slope(setting, low, high)


def _model(name: str, recipe: CompareRecipe, data_fields: dict[str, Any], kind: type[nn.Module]) -> _Model:
    """A preset and its overrides; settings for all are left out where a variant has no such option."""
    known, variant = variants(), recipe.bases.get(name, name)
    if variant not in known:
        raise UserError(f"there is no variant {variant!r} to compare, expected some of {', '.join(known)}")
    shared = shared_overrides(variant, recipe.model.size, recipe.model.overrides)
    return _Model(name, variant, recipe.model.size, data_fields, {**shared, **recipe.overrides.get(name, {})}, kind)
