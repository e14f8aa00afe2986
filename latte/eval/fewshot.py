"""Few-shot tasks by lm-evaluation-harness: multiple choice and LAMBADA, of one model or of several side by side."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerBase

from latte.data.tokenizer import load_tokenizer
from latte.errors import UserError, reason
from latte.eval.continuations import ContinuationScorer
from latte.eval.extension import EXTENDED, ORIGINAL, SINKS
from latte.eval.fewshot_tasks import NAMES, HarnessTasks, task_changes, task_files
from latte.extend.model import convert
from latte.extras import need
from latte.files import digest_file, digest_json, require_file_place, write_text
from latte.loading import load_any, load_original
from latte.loading.layout import read_extension
from latte.loading.models import model_weights, weight_files
from latte.loading.weights import FOLDER
from latte.models.quantize import quantize_model
from latte.recipe import EvalRecipe

SEED = 1234  # of the choice of solved examples, lm-eval's own


@dataclass(frozen=True)
class FewShot:
    """One model's score on one task."""

    model: str
    task: str
    shots: int
    questions: int
    metric: str  # acc, or acc_norm (by the answers' lengths) where lm-eval has it
    score: float
    standard_error: float
    sampler: str
    tokens: int  # that the model read
    seconds: float
    key: str  # digest of all that the score depends on


@dataclass(frozen=True)
class Candidate:
    """A model to score: its name in the table, what it is made of, and how it is loaded."""

    name: str
    digest: str
    load: Callable[[], tuple[Any, PreTrainedTokenizerBase]]


def run_fewshot(recipe: EvalRecipe, say: Callable[[str], None] = lambda message: None) -> list[FewShot]:
    """Scores of the recipe's model and of those beside it, on its tasks.

    They are written to the recipe's ``out``, if it has one, as soon as they are known. What stands there already is not
    measured again, and scores on other tasks stay there.

    Raises:
        UserError: lm-eval is missing, or a task, its files or a model can't be used.
    """
    kept = None if recipe.out is None else Path(recipe.out)
    if kept is not None:
        require_file_place(kept)
    need("lm_eval", "a few-shot task")
    changes = {name: task_changes(name, recipe.task_data, recipe.sampler) for name in recipe.task_names}
    found = [] if kept is None else read_scores(kept)
    rows: list[FewShot] = []
    with TemporaryDirectory() as scratch:
        tasks = HarnessTasks(changes, Path(scratch))
        for candidate in candidates(recipe):
            harness: Any = None
            for task, shots in product(tasks.taken, recipe.shots):
                about: Any = {"model": candidate.name, "task": task, "shots": shots, "sampler": recipe.sampler}
                key = _key(candidate, task, shots, recipe)
                row = next((replace(row, **about) for row in found if row.key == key), None)
                if row is None:
                    if harness is None:
                        say(f"loading {candidate.name}")
                        harness = open_harness(candidate, recipe)
                    row = FewShot(**about, key=key, **score_task(harness, tasks, task, shots, recipe.limit))
                    speed = row.tokens / max(row.seconds, 1e-9)
                    say(f"{row.model}: {task}, {shots} shots: {row.score:.1%} ({row.tokens:,} tokens, {speed:,.0f}/s)")
                rows.append(row)
                # A model that has another name now, or is another one under its name, has one row.
                found = [*(other for other in found if other.key != key and _place(other) != _place(row)), row]
                if kept is not None:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    write_text(kept, json.dumps({"rows": [asdict(row) for row in found]}, indent=1) + "\n")
    return rows


def read_scores(path: Path) -> list[FewShot]:
    """The scores in a file that :func:`run_fewshot` wrote; none without a file.

    Raises:
        UserError: it holds something else.
    """
    if not path.is_file():
        return []
    try:
        return [FewShot(**row) for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} holds something else than scores of tasks: give another --out") from error


def candidates(recipe: EvalRecipe) -> list[Candidate]:
    """The model and the one beside it; by default beside an extended model what it was made from, in two forms.

    These are the original, and the same on the window and the first tokens alone: the extension before any training.
    """
    extension = read_extension(recipe.model) if Path(recipe.model).is_dir() else None
    if recipe.beside is not None or extension is None:
        names = [recipe.model] if recipe.beside is None else [recipe.model, recipe.beside]
        return [_named(name, Path(name).name or name, recipe) for name in names]
    options = {**AutoConfig.from_pretrained(recipe.model).options, "kept": 0}
    source = extension.model

    def window_and_sinks() -> tuple[Any, PreTrainedTokenizerBase]:
        original = load_original(source)
        model = convert(original.model, options).eval()
        if recipe.weights != "stored":
            quantize_model(model, recipe.weights)
        return model, original.tokenizer if recipe.tokenizer is None else load_tokenizer(recipe.tokenizer)

    return [
        _named(source, ORIGINAL, recipe),
        Candidate(SINKS, digest_json([_digest(source), options, recipe.tokenizer, recipe.weights]), window_and_sinks),
        _named(recipe.model, EXTENDED, recipe),
    ]


def _named(source: str, name: str, recipe: EvalRecipe) -> Candidate:
    def load() -> tuple[Any, PreTrainedTokenizerBase]:
        return load_any(source, tokenizer_name=recipe.tokenizer, weights=recipe.weights)

    return Candidate(name, digest_json([_digest(source), recipe.tokenizer, recipe.weights]), load)


def _digest(source: str) -> str:
    """Changes with a model's weights where it is on this machine; elsewhere the name has to do."""
    if Path(source).is_dir():
        folder = model_weights(source).folder
        return digest_json([digest_file(file) for file in [folder / "config.json", *weight_files(folder, FOLDER)]])
    return digest_file(Path(source)) if Path(source).is_file() else source


def open_harness(candidate: Candidate, recipe: EvalRecipe) -> Any:
    """The model as lm-eval takes it; what requests share is read once."""
    from lm_eval.models.huggingface import HFLM

    class SharingLM(HFLM):  # type: ignore[misc, unused-ignore]
        """lm-eval's model of transformers; rows of tokens are scored by our scorer."""

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: Any = None) -> Any:
            pairs = [(context, continuation) for _, context, continuation in requests]
            found = [
                (score.log_probability, score.greedy) for score in self.scorer.score(pairs, longest=self.max_length)
            ]
            for (texts, *_), answer in zip(requests, found, strict=True):
                if texts is not None:  # none where a long text is scored in windows
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
            return found

    model, tokenizer = candidate.load()
    harness = SharingLM(pretrained=model, tokenizer=tokenizer, batch_size=recipe.batch_size, **_longest(model))
    harness.scorer = ContinuationScorer(model, recipe.batch_size)
    return harness


def score_task(harness: Any, tasks: HarnessTasks, task: str, shots: int, limit: int | None) -> dict[str, Any]:
    """The figures of the harness's model on one of the tasks."""
    from lm_eval import evaluate

    before, began = harness.scorer.tokens_read, time.perf_counter()
    try:
        # What lm-eval's simple_evaluate does, without its look at the hub and at everything installed here.
        loaded = tasks.manager.load([tasks.taken[task]])
        for one in loaded["tasks"].values():
            one.set_config(key="num_fewshot", value=shots)
            one.set_fewshot_seed(seed=SEED)
        found: Any = evaluate(
            harness, task_dict=loaded, limit=limit, bootstrap_iters=0, log_samples=False, verbosity="ERROR"
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"the task {task} could not be run: {reason(error)}") from error
    named = NAMES.get(task, task)
    results, questions = found["results"][named], int(found["n-samples"][named]["effective"])
    metric = "acc_norm" if "acc_norm,none" in results else "acc"
    score = float(results[f"{metric},none"])
    return {
        "questions": questions,
        "metric": metric,
        "score": score,
        "standard_error": (score * (1 - score) / max(1, questions - 1)) ** 0.5,  # lm-eval's own for a mean
        "tokens": harness.scorer.tokens_read - before,
        "seconds": round(time.perf_counter() - began, 3),
    }


def _key(candidate: Candidate, task: str, shots: int, recipe: EvalRecipe) -> str:
    files = [] if recipe.task_data is None else [digest_file(Path(file)) for file in task_files(task, recipe.task_data)]
    return digest_json([candidate.digest, task, shots, recipe.limit, recipe.sampler if shots else "", files])


def _place(row: FewShot) -> tuple[str, str, int]:
    """A file has one score of a model on a task with a number of shots."""
    return row.model, row.task, row.shots


def _longest(model: Any) -> dict[str, int]:
    """lm-eval cuts prompts at this length; the limit of a model that reads any length is no size of a buffer."""
    limit = getattr(model.config, "max_position_embeddings", None)
    return {"max_length": 4096} if limit is None or limit > 1 << 20 else {"max_length": int(limit)}
