"""The layout of a run's folder: the names of its files, and readers of the files that several rooms read.

RUN/                     written by latte train; a stage of latte extend and a model of latte compare are runs too
  config.yaml            the recipe
  data.json              digest of the corpus, compared when the run is resumed
  tokenizer/
  checkpoints/step-N/
  metrics.jsonl          one JSON object for each log and validation
  tensorboard/
  result.json            steps, parameters, speed and final validation loss
  model/                 final weights, configuration and tokenizer, for from_pretrained
  eval.json              loss by context and position (latte eval --out RUN/eval.json, latte compare)
  samples.jsonl          text written while training (train.sample_every)
  samples.json           text written by the model (latte compare)
  compare.json           the run's row of a comparison, with a digest of the settings that it was measured with

OUT/                     written by latte compare: a run's folder for each model, and
  results.json           all rows
  search/NAME.json       validation losses of a model's short runs, by learning rate
  speeds.json            speeds of all models, timed in turns
  jobs.yaml, NAME.log    the recipe as its processes read it, and what the process of a model shows (--jobs)

OUT-run/                 written by latte extend: config.yaml, data.json, a run's folder for each stage, and
  check.json             largest differences between the logits of the converted and the pretrained model
  judge.json             every measurement, written as soon as it is made
  frontier.json          the same, of the comparison at equal memory
  remember/              scores of the tokens to keep: scores/, metrics.jsonl by row, layers.json
  results.json           all figures; also in OUT, beside the extended model, its recipe.yaml and report.html
  STAGE/layers.json      distance of each layer from the pretrained one after the stage
  STAGE/layers_before.json   the same before the first stage
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from latte.recipe import ExtendRecipe, Recipe, from_yaml

CONFIG, DATA, LOCK = "config.yaml", "data.json", ".lock"
TOKENIZER, CHECKPOINTS, MODEL = "tokenizer", "checkpoints", "model"
METRICS, TENSORBOARD, RESULT = "metrics.jsonl", "tensorboard", "result.json"
EVAL, SAMPLES, TRAINING_SAMPLES = "eval.json", "samples.json", "samples.jsonl"
#: One run's row of a comparison, in the run's folder, and all rows, in the comparison's.
COMPARED, COMPARISON = "compare.json", "results.json"
#: In the comparison's folder: losses of the search for learning rates, speeds of all models, the recipe for processes.
SEARCH, SPEEDS, JOBS = "search", "speeds.json", "jobs.yaml"
CHECK, JUDGED, FRONTIER, EXTENSION_RESULTS = "check.json", "judge.json", "frontier.json", "results.json"
REPLACED = "replaced.json"  # what replacing each layer alone costs
RECIPE = "recipe.yaml"  # beside an extended model
LAYERS_BEFORE, LAYERS = "layers_before.json", "layers.json"


def read_recipe(folder: str | Path) -> Recipe | None:
    """The recipe of a training run; None if the folder has none.

    Raises:
        UserError: the file is not a recipe of a training run.
    """
    path = Path(folder) / CONFIG
    return from_yaml(Recipe, path) if path.is_file() else None


def read_extension(folder: str | Path) -> ExtendRecipe | None:
    """The recipe beside an extended model; None if the folder has none.

    Raises:
        UserError: the file is not a recipe of an extension.
    """
    path = Path(folder) / RECIPE
    return from_yaml(ExtendRecipe, path) if path.is_file() and (path.parent / EXTENSION_RESULTS).is_file() else None


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All complete lines of a run's metrics."""
    return read_lines(folder / METRICS)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines; a line that a killed process left unfinished is skipped."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return []
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in lines if isinstance(line, dict)]
