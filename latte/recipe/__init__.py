"""Recipes: every setting of a run, typed and documented. Imports nothing heavy, so that --help is fast."""

from latte.recipe.compare import CompareRecipe
from latte.recipe.extend import STAGES, DistilRecipe, ExtendRecipe, JudgeRecipe, RememberRecipe, StageRecipe
from latte.recipe.files import anchored, flatten, from_yaml, require_same, to_yaml
from latte.recipe.read import ChatRecipe, EvalRecipe, GenerateRecipe, ReadRecipe, WriteRecipe
from latte.recipe.show import SERVING_SUITES, TIMED_SUITES, BenchRecipe, DoctorRecipe, InspectRecipe, ReportRecipe
from latte.recipe.tasks import ClassifyRecipe, RecallRecipe, TaskName
from latte.recipe.train import AUTO, DataRecipe, ModelRecipe, Recipe, TrainRecipe

__all__ = [
    "AUTO",
    "SERVING_SUITES",
    "STAGES",
    "TIMED_SUITES",
    "BenchRecipe",
    "ChatRecipe",
    "ClassifyRecipe",
    "CompareRecipe",
    "DataRecipe",
    "DistilRecipe",
    "DoctorRecipe",
    "EvalRecipe",
    "ExtendRecipe",
    "GenerateRecipe",
    "InspectRecipe",
    "JudgeRecipe",
    "ModelRecipe",
    "ReadRecipe",
    "RecallRecipe",
    "Recipe",
    "RememberRecipe",
    "ReportRecipe",
    "StageRecipe",
    "TaskName",
    "TrainRecipe",
    "WriteRecipe",
    "anchored",
    "flatten",
    "from_yaml",
    "require_same",
    "to_yaml",
]
