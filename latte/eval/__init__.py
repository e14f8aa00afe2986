"""Evaluation and generation, both by streaming with the model's state."""

from latte.eval.stream import AtContext, AtPosition, Evaluation, Text, evaluate
from latte.recipe import EvalRecipe

__all__ = ["AtContext", "AtPosition", "EvalRecipe", "Evaluation", "Text", "evaluate"]
