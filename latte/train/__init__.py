"""Training runs that can be interrupted at any moment and resumed by the same command."""

from latte.recipe import ModelRecipe, Recipe, TrainRecipe
from latte.train.run import Result, fit, run_folder, train
from latte.train.trainer import training_arguments

__all__ = [
    "ModelRecipe",
    "Recipe",
    "Result",
    "TrainRecipe",
    "fit",
    "run_folder",
    "train",
    "training_arguments",
]
