"""One model of a comparison in a process of its own: ``python -m latte.workflows.one_model RECIPE NAME``.

Standard output has what the comparison says, standard error what the training shows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from latte.errors import Stopped, UserError
from latte.memory import keep_memory
from latte.recipe import CompareRecipe, from_yaml
from latte.workflows.comparison import compare_one, open_comparison


def main(arguments: Sequence[str]) -> int:
    """Train and evaluate the model; what an earlier call has done is read from the folders."""
    path, name = arguments
    recipe = from_yaml(CompareRecipe, Path(path))
    try:
        task, recipes = open_comparison(recipe, lambda message: None)
        compare_one(name, recipes[name], recipe, task, partial(print, flush=True))
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        return 128 + stopped.signal_number
    except UserError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    keep_memory()  # before the first tensor, as commands do
    sys.exit(main(sys.argv[1:]))
