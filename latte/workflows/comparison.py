"""``latte compare`` from start to end: train several models on the same budget, then measure and time them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from latte.data import Corpus, PackedRows
from latte.errors import UserError
from latte.eval.comparison import Row, measure
from latte.eval.speed import load_average, time_models
from latte.eval.tasks import TaskRow, measure_task
from latte.files import digest_json, write_text
from latte.loading.layout import COMPARED, JOBS, SEARCH, SPEEDS, read_recipe
from latte.recipe import CompareRecipe, Recipe, anchored, flatten, require_same, to_yaml
from latte.tasks import TASKS, Language, Task, open_task
from latte.train import train
from latte.workflows.processes import Job, run_jobs
from latte.workflows.rates import choose_rate
from latte.workflows.sizes import plan, run_recipe

Say = Callable[[str], None]


def compare(recipe: CompareRecipe, say: Say = lambda message: None) -> list[Row] | list[TaskRow]:
    """Choose a learning rate for each model, train and evaluate it, ``jobs`` models at once; then time all in turns.

    Models of tasks with answers are compared by accuracy, and not timed apart from their training. What an earlier call
    has done is read from the folders.

    Raises:
        UserError: settings or data that can't be used, or a training that failed.
        Stopped: a signal came while training; everything is saved.
    """
    recipe = anchored(recipe)
    task, recipes = open_comparison(recipe, say)
    if recipe.jobs > 1:
        new = [name for name, settings in recipes.items() if not (Path(settings.out) / COMPARED).is_file()]
        compare_in_processes(recipe, new, say)
    found = [compare_one(name, recipes[name], recipe, task, say) for name in recipes]
    if isinstance(task, Language):
        return _with_speeds([Row(**row) for row in found], recipes, recipe, task.corpus, say)
    return [TaskRow(**row) for row in found]


def open_comparison(recipe: CompareRecipe, say: Say) -> tuple[Task, dict[str, Recipe]]:
    """The data, and the training recipe of each model that is wanted; all that can be refused is refused here.

    Raises:
        UserError: settings or data that can't be used, or a folder of another run.
    """
    task = open_task(run_recipe(recipe), say)
    if isinstance(task, Language):
        check_text(recipe, task.corpus)
    # All are planned: sizes are matched with those of all variants.
    recipes = plan(recipe, task.fields, task.model_class)
    recipes = {name: settings for name, settings in recipes.items() if name in (recipe.only or recipes)}
    for settings in recipes.values():
        check_run(settings, rate_is_searched=bool(recipe.learning_rates))
    return task, recipes


def compare_in_processes(recipe: CompareRecipe, names: list[str], say: Say) -> None:
    """Train and evaluate these models, each in a process of its own; afterwards the folders have their rows.

    The cores are divided among the processes: small models gain less from a second thread than from a second process.
    """
    if not names:
        return
    out = Path(recipe.out)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / JOBS, to_yaml(recipe))
    command = [sys.executable, "-m", "latte.workflows.one_model", str(out / JOBS)]
    say(f"{len(names)} models, {recipe.jobs} at once; what they show goes to {out}/NAME.log")
    jobs = [Job(name, [*command, name], out / f"{name}.log") for name in names]
    run_jobs(jobs, recipe.jobs, max(1, torch.get_num_threads() // recipe.jobs), say)


def compare_one(name: str, settings: Recipe, recipe: CompareRecipe, task: Task, say: Say) -> dict[str, Any]:
    """One model's row, without speeds; read from the model's folder where an earlier call has made it."""
    searched: list[tuple[float, float | None]] = []
    if recipe.learning_rates:
        folder, steps = Path(recipe.out) / SEARCH, recipe.steps_of_search
        search = choose_rate(name, settings, recipe.learning_rates, steps, folder, task.digest, say)
        searched = list(zip(search.rates, search.losses, strict=True))
        settings = replace(settings, train=replace(settings.train, learning_rate=search.best))
    kept = Path(settings.out) / COMPARED
    key = digest_json([asdict(settings), searched, _measuring(recipe)])
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    if found.get("key") != key:
        say(f"{name}: training" + (f" with learning rate {settings.train.learning_rate:g}" if searched else ""))
        _train(settings, recipe.isolate)
        say(f"{name}: measuring")
        row: Row | TaskRow
        if isinstance(task, Language):
            row = measure(name, settings, recipe, searched)
        else:
            row = measure_task(name, settings, task, searched)
        found = {"key": key, "row": asdict(row)}
        write_text(kept, json.dumps(found, indent=1) + "\n")
    return found["row"]


def _with_speeds(
    rows: list[Row], recipes: dict[str, Recipe], recipe: CompareRecipe, corpus: Corpus, say: Say
) -> list[Row]:
    """The rows with speeds, which are timed unless the same models were timed in the same way before."""
    kept = Path(recipe.out) / SPEEDS
    names = ("decode_context", "decode_tokens", "timing_rounds")
    models = [[asdict(settings.model), row.parameters] for settings, row in zip(recipes.values(), rows, strict=True)]
    key = digest_json([{name: getattr(recipe, name) for name in names}, models, asdict(recipe.train)])
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    if found.get("key") != key or recipe.time_again:
        packed = PackedRows(corpus.train, recipe.data.sequence_length)
        batch = packed.batch([index % len(packed) for index in range(recipe.train.batch_size)])
        load = load_average()
        speeds = time_models(
            {name: settings.out for name, settings in recipes.items()},
            batch,
            recipe.train,
            context=recipe.decode_context,
            tokens=recipe.decode_tokens,
            rounds=recipe.timing_rounds,
            say=say,
        )
        found = {"key": key, "load_average": load, "speeds": {name: asdict(speed) for name, speed in speeds.items()}}
        write_text(kept, json.dumps(found, indent=1) + "\n")
    timed = []
    for row, settings in zip(rows, recipes.values(), strict=True):
        row = replace(row, **found["speeds"][row.name], load_average=found["load_average"])
        own = Path(settings.out) / COMPARED
        about = json.loads(own.read_text(encoding="utf-8"))
        if about["row"] != asdict(row):
            write_text(own, json.dumps({**about, "row": asdict(row)}, indent=1) + "\n")
        timed.append(row)
    return timed


def check_text(recipe: CompareRecipe, corpus: Corpus) -> None:
    """Refuse, before any training, text that could not be measured on after it.

    Raises:
        UserError: no validation document is long enough.
    """
    longest = max((len(ids) for ids, _ in corpus.valid.documents()), default=0)
    if longest < max(2, recipe.min_document_tokens):
        raise UserError(
            f"min_document_tokens is {recipe.min_document_tokens}, but the longest validation document has {longest} "
            "tokens"
        )
    for part in (corpus.train, corpus.valid):
        PackedRows(part, recipe.data.sequence_length, "training part" if part is corpus.train else "validation part")


def check_run(settings: Recipe, rate_is_searched: bool = False) -> None:
    """Refuse a folder of another run at once; of another number of steps too, since all have to read as much.

    Args:
        rate_is_searched: the learning rate is not known yet; the run compares it when it goes on.

    Raises:
        UserError: the folder holds a run with other settings.
    """
    recorded = read_recipe(settings.out)
    if recorded is None:
        return
    mine = TASKS[settings.task].settled(settings)
    if rate_is_searched:
        mine = replace(mine, train=replace(mine.train, learning_rate=recorded.train.learning_rate))
    require_same(flatten(mine), flatten(recorded), settings.out)
    if mine.train.steps != recorded.train.steps:
        raise UserError(
            f"{settings.out} was trained for {recorded.train.steps} steps, now {mine.train.steps}: give another --out, "
            "so that all models are trained alike"
        )


def _train(settings: Recipe, isolate: bool) -> None:
    if not isolate:
        train(settings)
        return
    folder = Path(settings.out)
    folder.parent.mkdir(parents=True, exist_ok=True)
    settings_file = folder.parent / f"{folder.name}.yaml"
    write_text(settings_file, to_yaml(settings))
    command = [sys.executable, "-m", "latte.cli.main", "train", "--config", str(settings_file)]
    run_jobs([Job(f"the training of {folder.name}", command)])


def _measuring(recipe: CompareRecipe) -> dict[str, Any]:
    names = ("eval_tokens", "eval_contexts", "min_document_tokens", "join_documents", "decode_context")
    return {name: getattr(recipe, name) for name in (*names, "sample_prompt", "sample_tokens")}
