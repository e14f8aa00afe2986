"""Recipes: every setting of a run, typed and documented. Imports nothing heavy, so that --help is fast."""

from latte.recipe.compare import CompareRecipe
from latte.recipe.extend import STAGES, DistilRecipe, ExtendRecipe, JudgeRecipe, StageRecipe
from latte.recipe.files import flatten, from_yaml, require_same, to_yaml
from latte.recipe.read import EvalRecipe, GenerateRecipe
from latte.recipe.train import DataRecipe, ModelRecipe, Recipe, TrainRecipe

__all__ = [
    "STAGES",
    "CompareRecipe",
    "DataRecipe",
    "DistilRecipe",
    "EvalRecipe",
    "ExtendRecipe",
    "GenerateRecipe",
    "JudgeRecipe",
    "ModelRecipe",
    "Recipe",
    "StageRecipe",
    "TrainRecipe",
    "flatten",
    "from_yaml",
    "require_same",
    "to_yaml",
]
