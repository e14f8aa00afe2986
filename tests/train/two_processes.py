"""Run by torchrun: trains a recipe with each strategy, and notes what the model's parameters were made of."""

import sys
from pathlib import Path

from latte.recipe import Recipe, from_yaml
from latte.train import run, train

recipe = from_yaml(Recipe, Path(sys.argv[1]))
for strategy in sys.argv[2:]:
    recipe.train.strategy = strategy
    recipe.out = str(Path(sys.argv[1]).parent / strategy)
    finish = run._finish

    def note(trainer, folder, *rest, finish=finish):
        kinds = {type(parameter).__name__ for parameter in trainer.model.parameters()}
        result = finish(trainer, folder, *rest)
        (folder / f"kinds-{trainer.args.process_index}").write_text(" ".join(sorted(kinds)))
        return result

    run._finish = note
    train(recipe)
    run._finish = finish
