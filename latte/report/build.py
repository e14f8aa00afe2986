"""The report of one or several runs: the contents of their folders, inspections and costs of their models, one page."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from latte import __version__, doctor
from latte.data import prepare
from latte.data.tokenizer import encode_documents
from latte.errors import UserError
from latte.eval.comparison import Row
from latte.eval.generate import Reader, stream_text
from latte.eval.stream import longest_context
from latte.loading import load_folder, model_weights
from latte.loading.layout import COMPARISON
from latte.recipe import DataRecipe, GenerateRecipe
from latte.report.cost import measure_cost
from latte.report.encode import encode_inspection
from latte.report.inspection import Inspection, inspect_ids
from latte.report.latents import latent_use
from latte.report.page import render_page
from latte.report.runs import RunView, Unlogged, find_runs, read_run
from latte.report.tasks import LANGUAGE, example_ids, task_lead
from latte.report.verdict import losses_to_others

#: Columns of the table: key, name, format, which way is better, and what it is.
COLUMNS = (
    ("parameters", "parameters", "count", None, "Numbers that were learned"),
    ("accuracy", "accuracy", "percent", "high", "Share of right answers on examples that were never trained on"),
    (
        "valid_loss",
        "held-out loss",
        "number",
        "low",
        "Mean surprise of a token of unseen text, in nats, at the length of training",
    ),
    ("perplexity", "perplexity", "number", "low", "e to that loss"),
    ("bits_per_byte", "bits a byte", "number", "low", "Surprise of unseen text by its bytes, whatever the tokens"),
    ("long_loss", "loss at longest context", "number", "low", "Loss where the text is read in the longest stretches"),
    ("tokens_per_second", "training tokens/s", "rate", "high", "Tokens trained on in a second"),
    ("peak_memory", "peak memory", "bytes", "low", "The most memory that training held"),
    ("decode", "writing tokens/s", "rate", "high", "Tokens written in a second, deep into a text"),
    (
        "module_decode",
        "by modules",
        "rate",
        "high",
        "The same with torch modules alone, layer by layer, as every model can",
    ),
    ("state", "memory of the past", "bytes", "low", "What is kept of a long text, to go on from it"),
)
#: What decodes a token, as compare and the cost of a report name it.
ENGINES = {"kernel": "one native call a token", "modules": "torch, layer by layer"}
NUMBERS = {2: "Two", 3: "Three", 4: "Four", 5: "Five", 6: "Six", 7: "Seven", 8: "Eight"}


@dataclass
class Report:
    """Everything that the page shows."""

    runs: list[RunView]
    inspections: dict[str, Inspection] = field(default_factory=dict)  # by the run's name
    notes: list[str] = field(default_factory=list)
    losses: tuple[str, list[tuple[str, str]]] | None = None  # of a comparison: the first model, and what it loses where


def build_report(
    folder: str | Path,
    *,
    text: str | None = None,
    measure: bool = True,
    sample_tokens: int = 160,
    say: Callable[[str], None] = lambda message: None,
) -> Report:
    """Read a run's folder or a folder of runs; inspect each model, sample from it, and measure its cost.

    Of a run that is not finished, the newest whole checkpoint is used, and the page says so.

    Args:
        text: the text to inspect models on; the default is the beginning of a validation document.
        measure: whether to measure speed and memory by length of context.
        sample_tokens: length of a sample for runs that have none; 0 writes none.
        say: called with a message before a slow step.

    Raises:
        UserError: no such folder, no run in it, or no metrics yet.
    """
    folders = find_runs(Path(folder))
    runs, notes = _read_all(folders)
    if len(folders) == 1:
        runs[0].name = runs[0].variant
    report = Report(runs, notes=notes, losses=_losses(Path(folder)))
    trained = [run for run in runs if _has_model(run, report.notes)]
    length = None
    for run in trained:
        say(f"looking inside {run.name}")
        model, tokenizer = load_folder(run.folder, say)
        length = length or _inspected_tokens(len(trained), model.config)
        run.row["parameters"] = run.row["parameters"] or sum(weight.numel() for weight in model.parameters())
        ids, note = _ids(run, tokenizer, text)
        if note and note not in report.notes:
            report.notes.append(note)
        if ids is not None:
            report.inspections[run.name] = inspect_ids(model, tokenizer, ids[:length], title=run.name)
            if not run.samples and sample_tokens and run.task == LANGUAGE:
                run.samples = [_write(model, tokenizer, ids[: max(2, min(32, len(ids) // 2))], sample_tokens)]
        if measure and not run.read and run.task == LANGUAGE:
            say(f"measuring {run.name}")
            costs = measure_cost(model)
            run.read = [(cost.length, cost.read) for cost in costs]
            run.decode = [(cost.length, cost.decode) for cost in costs]
            run.memory = [(cost.length, cost.memory) for cost in costs]
            run.engine = run.engine or (costs[-1].engine if costs else "")
    _fill_losses(runs)
    for curve, key in (("decode", "decode"), ("memory", "state")):
        # Keep the figures of a comparison, which measured all runs in the same way.
        if any(run.row.get(key) is None for run in runs):
            _at_longest(runs, curve, key)
    if not any(run.context for run in runs) and runs[0].task == LANGUAGE:
        report.notes.append("Quality by context is not measured yet: latte eval RUN --out RUN/eval.json adds it.")
    return report


def _read_all(folders: list[Path]) -> tuple[list[RunView], list[str]]:
    """The runs, and a note for each that has not logged a loss yet; if none has, that is the error."""
    runs, notes, failure = list[RunView](), list[str](), None
    for path in folders:
        try:
            runs.append(read_run(path))
        except Unlogged as error:
            failure = error
            notes.append(f"{path.name} is left out, it has not logged a loss yet.")
    if not runs and failure is not None:
        raise failure
    return runs, notes


def _losses(folder: Path) -> tuple[str, list[tuple[str, str]]] | None:
    """What the first model of a comparison loses to others; None if the folder holds no comparison of several."""
    path = folder / COMPARISON
    try:
        rows = [Row(**row) for row in json.loads(path.read_text(encoding="utf-8"))] if path.is_file() else []
    except (TypeError, ValueError):
        return None  # another kind of results, or of an earlier version
    return (rows[0].name, losses_to_others(rows)) if len(rows) > 1 else None


def _fill_losses(runs: list[RunView]) -> None:
    """The losses of the table, all of the same tokens: those that every length was measured on, if all runs have them.

    Otherwise they are those of each training's own validation, and there is none at the longest context.
    """
    if _scored(runs):
        for run in runs:
            run.row |= {"valid_loss": run.at_training["loss"], "perplexity": run.at_training["perplexity"]}
            run.row["bits_per_byte"] = run.at_training.get("bits_per_byte")
        _at_longest(runs, "context", "long_loss")
        return
    for run in runs:
        loss = run.row.get("valid_loss")
        run.row["perplexity"] = None if loss is None or run.task != LANGUAGE else math.exp(min(loss, 700.0))


def _scored(runs: list[RunView]) -> int | None:
    """Number of held-out tokens that all runs were measured on at the length of training; None if they were not."""
    counts = {run.at_training.get("tokens") for run in runs}
    return counts.pop() if len(counts) == 1 else None


def render_report(report: Report) -> str:
    """The report as one HTML page that needs nothing else."""
    runs = report.runs
    data = {
        "facts": facts(report),
        "columns": [
            dict(zip(("key", "label", "format", "better", "about"), column, strict=True)) for column in COLUMNS
        ],
        "table_note": _table_note(runs),
        "scored": _scored(runs),
        "engines": _engines(runs),
        "train_length": runs[0].setting("data", "sequence_length"),
        "notes": report.notes,
        "losses": None if report.losses is None else dict(zip(("name", "points"), report.losses, strict=True)),
        "same": _same(runs),
        "task": runs[0].task,
        "chance": runs[0].row.get("chance"),
        "runs": [_run(run, report.inspections.get(run.name)) for run in runs],
    }
    title = runs[0].name if len(runs) == 1 else " and ".join(run.name for run in runs[:2])
    if len(runs) > 2:
        title = f"{NUMBERS.get(len(runs), len(runs))} models, one budget"
    footer = f"<p>Made by latte {html.escape(__version__)}. This page is one file and loads nothing.</p>"
    return render_page(title, "Latte report", lead(runs), footer, data, "report.js")


def lead(runs: list[RunView]) -> str:
    """What was trained and with which result, in two sentences."""
    source = _source(runs[0])
    tokens = ("" if _same(runs) else "up to ") + _words(max(run.row.get("tokens") or 0 for run in runs))
    if runs[0].task != LANGUAGE:
        return task_lead(runs, NUMBERS.get(len(runs), str(len(runs))), tokens)
    ranked = sorted((run for run in runs if run.row.get("valid_loss") is not None), key=lambda run: _loss(run))
    sizes = sorted(run.row.get("parameters") or 0 for run in runs)
    if len(runs) == 1:
        size = f"of {_words(sizes[0])} parameters " if sizes[0] else ""
        text = f"A language model {size}that has read {tokens} tokens of {source}."
        if ranked:
            text += f" On text it has never seen its loss is {_loss(ranked[0]):.3f} nats a token"
            text += f", a perplexity of {math.exp(_loss(ranked[0])):.1f}."
        return text
    size = f" of {_words(sizes[0])}" if sizes[0] else ""
    size += f" to {_words(sizes[-1])}" if sizes[0] and _words(sizes[0]) != _words(sizes[-1]) else ""
    number = NUMBERS.get(len(runs), str(len(runs)))
    text = (
        f"{number} language models{size + ' parameters' if size else ''}, each trained on {tokens} tokens of {source}."
    )
    if len(ranked) > 1:
        best, other = ranked[0], ranked[1] if len(runs) == 2 else ranked[-1]
        text += f" On text they have never seen, at the length of training, {best.name} comes first with"
        text += f" {_loss(best):.3f} nats a token"
        text += f", {other.name} {'' if len(runs) == 2 else 'last '}with {_loss(other):.3f}."
    return text + _far(runs)


def _far(runs: list[RunView]) -> str:
    """The best and the worst loss beyond the training length."""
    longest, trained = _longest(runs, "context"), runs[0].setting("data", "sequence_length")
    ranked = sorted(
        (run for run in runs if run.row.get("long_loss") is not None), key=lambda run: _value(run, "long_loss")
    )
    if len(ranked) < 2 or not longest or not trained or longest <= trained:
        return ""
    best, worst = ranked[0], ranked[-1]
    where = f" On the same tokens, read at {longest / trained:.3g} times the length of training"
    first, last = f"{_value(best, 'long_loss'):.3f}", f"{_value(worst, 'long_loss'):.3f}"
    if len(ranked) == 2:
        return f"{where}, {best.name} has {first} and {worst.name} {last}."
    return f"{where} the best is {best.name} with {first}, the last {worst.name} with {last}."


def facts(report: Report) -> list[tuple[str, str]]:
    """Names and values under the title."""
    run, threads = report.runs[0], torch.get_num_threads()
    found: list[tuple[str, Any]] = [
        ("Size", run.setting("model", "size")),
        ("Task", None if run.task == LANGUAGE else run.task),
        ("Text", _source(run) if run.task == LANGUAGE else None),
        ("Tokenizer", _tokenizer(run) if run.task == LANGUAGE else None),
        ("Tokens trained on", f"{int(max(run.row.get('tokens') or 0 for run in report.runs)):,}"),
        ("Steps", f"{run.setting('train', 'steps'):,}" if run.setting("train", "steps") else None),
        ("Batch", _batch(run)),
        ("Seed", run.setting("train", "seed")),
        ("This page’s machine", f"{doctor.device()}, {threads} thread{'s' * (threads > 1)}"),
    ]
    return [(name, str(value)) for name, value in found if value not in (None, "")]


def _batch(run: RunView) -> str | None:
    batch, length = run.setting("train", "batch_size"), run.setting("data", "sequence_length")
    if not batch or not length:
        return None
    return f"{batch} × {length} tokens" if run.task == LANGUAGE else f"{batch} examples"


def _run(run: RunView, inspection: Inspection | None) -> dict[str, Any]:
    result: dict[str, Any] = {"name": run.name, "row": run.row, "settings": run.settings, "samples": run.samples}
    result["progress"] = run.progress
    result["scores"] = run.scores
    result["collapse"] = {
        figure: [
            [layer, [[_short(x), _short(y)] for x, y in _thin(points)]] for layer, points in sorted(layers.items())
        ]
        for figure, layers in run.collapse.items()
    }
    for name in ("train", "valid", "accuracy", "context", "positions", "read", "decode", "memory"):
        result[name] = [[_short(x), _short(y)] for x, y in _thin(getattr(run, name))]
    if inspection is not None:
        result["inspection"] = encode_inspection(inspection)
        result["latents"] = [_use(layer) if layer.slots_THM is not None else None for layer in inspection.layers]
    return result


def _use(layer: Any) -> dict[str, Any]:
    use = latent_use(layer)
    return {
        "use": [[_short(x) for x in row] for row in use.use_HM],
        "entropy": [_short(x) for x in use.entropy_H],
        "effective": [_short(x) for x in use.effective_H],
        "reach": [[_short(x) for x in row] for row in use.reach_HL],
    }


def _has_model(run: RunView, notes: list[str]) -> bool:
    """Whether a run has a final model or a checkpoint; what is not final is noted."""
    try:
        step = model_weights(run.folder, lambda message: None).step
    except UserError as error:
        notes.append(f"There are no samples of {run.name} and nothing to look inside: {error}.")
        return False
    if step is not None:
        steps = run.setting("train", "steps")
        notes.append(
            f"{run.name} is not finished: this is its checkpoint at step {step}{f' of {steps}' * bool(steps)}."
        )
    return True


def _inspected_tokens(models: int, config: Any) -> int:
    """Length of the inspected text: it keeps the page at a few megabytes."""
    heads = models * config.num_hidden_layers * config.num_attention_heads
    return 192 if heads <= 48 else 128 if heads <= 128 else 96


def _ids(run: RunView, tokenizer: Any, text: str | None) -> tuple[Any, str | None]:
    """Tokens to inspect: of the given text, or of the first validation document that is long enough."""
    if text is not None:
        if not text:
            raise UserError("the text is empty: there is nothing to look at")
        return encode_documents(tokenizer, [text])[0], None
    if run.task != LANGUAGE:
        return example_ids(run)
    if "data" not in run.recipe:
        return None, "The runs do not say what text they were trained on: give --text or --file to look inside."
    try:
        valid = prepare(DataRecipe(**run.recipe["data"])).valid
    except (UserError, TypeError, OSError) as error:
        return None, f"The validation text could not be read again ({error}): give --text or --file to look inside."
    lengths = valid.starts[1:] - valid.starts[:-1]
    long_enough = [index for index, length in enumerate(lengths) if length >= 256]
    return valid.document(long_enough[0] if long_enough else int(lengths.argmax())), None


def _write(model: Any, tokenizer: Any, ids: Any, new_tokens: int) -> dict[str, str]:
    limit = longest_context(model)
    count = new_tokens if limit is None else min(new_tokens, limit - len(ids))
    reader = Reader(model, tokenizer)
    reader.read_ids(ids.tolist())
    text = "".join(stream_text(reader, GenerateRecipe(max_new_tokens=max(0, count), temperature=0.8, top_p=0.95)))
    return {"prompt": tokenizer.decode(ids, skip_special_tokens=True), "text": text}


def _longest(runs: Iterable[RunView], curve: str) -> float | None:
    """The longest length that is in all curves."""
    lengths = [{x for x, _ in getattr(run, curve)} for run in runs if getattr(run, curve)]
    common = set.intersection(*lengths) if lengths else set()
    return max(common) if common else None


def _same(runs: list[RunView]) -> bool:
    """Whether all runs have the same data settings and the same number of tokens."""
    return all(run.recipe.get("data") == runs[0].recipe.get("data") for run in runs) and (
        len({run.row.get("tokens") for run in runs}) == 1
    )


def _at_longest(runs: list[RunView], curve: str, key: str) -> None:
    """Fill a column with every curve's value at the longest common length."""
    longest = _longest(runs, curve)
    for run in runs:
        run.row[key] = dict(getattr(run, curve)).get(longest)


def _table_note(runs: list[RunView]) -> str:
    longest, trained = _longest(runs, "context"), runs[0].setting("data", "sequence_length")
    text = "Writing speed and memory of the past are for one text."
    text += _engines(runs)
    if runs[0].task != LANGUAGE:
        return (
            ""
            if not runs[0].scores
            else "Accuracy is of all test examples, losses of those that training validated on."
        )
    scored = _scored(runs)
    if scored is None:
        return f"Losses are of the rows that training validated on. {text}"
    text = f"Losses at all lengths are of the same {scored:,} held-out tokens. {text}"
    if longest is None:
        return text
    times = f", {longest / trained:.3g} times the length of training" if trained and longest > trained else ""
    return f"The longest context is {longest:,.0f} tokens{times}. {text}"


def _engines(runs: list[RunView]) -> str:
    """A sentence about writing speeds that were measured in different engines; empty if there was one."""
    if len({run.engine for run in runs}) < 2:
        return ""
    engines = ", ".join(f"{run.name} by {ENGINES.get(run.engine, 'an unknown engine')}" for run in runs)
    return f" Writing speeds compare engines as well as mechanisms: {engines}."


def _thin(points: list[tuple[float, float]], most: int = 1500) -> list[tuple[float, float]]:
    """At most about ``most`` points: every n-th, and the last."""
    every = -(-len(points) // most)
    return points if every <= 1 else [*points[:-1:every], points[-1]]


def _short(value: float) -> float:
    return float(f"{float(value):.6g}")


def _value(run: RunView, key: str) -> float:
    value = run.row.get(key)
    return math.inf if value is None else float(value)


def _loss(run: RunView) -> float:
    return _value(run, "valid_loss")


def _source(run: RunView) -> str:
    source = str(run.setting("data", "source") or "text")
    if source == "python-stdlib":
        return "the Python standard library’s source"
    return source.removeprefix("hf:") if source.startswith("hf:") else Path(source).name


def _tokenizer(run: RunView) -> str | None:
    name = run.setting("data", "tokenizer")
    if name in ("bpe", "auto"):
        return f"byte-level BPE of {run.setting('data', 'vocab_size')}"
    return name


def _words(count: float) -> str:
    for limit, word in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if count >= limit:
            return f"{count / limit:.{0 if count >= 100 * limit else 1}f}".removesuffix(".0") + f" {word}"
    return str(int(count))
