"""``latte extend`` from start to end: load, convert, train in stages, evaluate, and write the model's folder."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from latte.data import Corpus, prepare
from latte.data.tokenizer import save_tokenizer
from latte.errors import UserError
from latte.eval.extension import EXTENDED, LONG, ORIGINAL, SINKS, VALIDATION, WINDOW, Contender, check_judge, judge
from latte.eval.run import read_text, take
from latte.eval.stream import Text
from latte.extend.check import TOKENS, check_conversion
from latte.extend.model import LatteExtendedForCausalLM, convert
from latte.files import Damaged, digest_json, remove, verify_files, whole_folder, write_text
from latte.loading import Original, load_original, use_blocks
from latte.loading.layout import (
    CHECK,
    CHECKPOINTS,
    EXTENSION_RESULTS,
    FRONTIER,
    JUDGED,
    LAYERS,
    LAYERS_BEFORE,
    REPLACED,
    read_metrics,
)
from latte.loading.weights import READ
from latte.recipe import DataRecipe, EvalRecipe, ExtendRecipe, anchored, to_yaml
from latte.recipe.extend import judged_name
from latte.report.extension import render_results
from latte.report.extension_plots import write_plots
from latte.report.model_card import model_card
from latte.train.run import run_folder
from latte.train.trainer import seed_everything, training_arguments
from latte.workflows.frontier import check_frontier, measure_frontier
from latte.workflows.hybrid import check_full_layers, dearest, replacement_costs, with_full_layers
from latte.workflows.remembering import NAME as REMEMBER
from latte.workflows.remembering import plan_remember
from latte.workflows.stages import Stage, open_latents, plan_stages

KIND = "latte-extended-1"


def extend(recipe: ExtendRecipe, console: Console | None = None) -> Path:
    """Extend a pretrained model as a recipe says, or resume an earlier call with the same recipe.

    Returns the folder of the extended model, for ``AutoModelForCausalLM.from_pretrained`` after ``import latte``.

    Raises:
        UserError: a model, text, setting or folder that can't be used.
        Stopped: SIGTERM or SIGINT came; everything is saved.
    """
    console = console or Console(file=sys.stderr)
    out, run = Path(recipe.out), Path(f"{recipe.out.rstrip('/')}-run")
    _require_free(out, run)
    recipe = anchored(recipe)
    original, corpus = open_inputs(recipe, console)
    options = mixer_options(recipe)
    stages = plan_stages(recipe, corpus, run)
    remember = plan_remember(recipe, corpus, original, run, console.print)
    args = training_arguments(run, recipe.transfer.train_recipe(recipe.seed))
    digest = digest_json([original.digest, corpus.digest, *([] if remember is None else remember.digests)])
    with _nothing_left_of_a_refusal(run), run_folder(run, args, recipe, digest):
        if _is_done(out, recipe):
            console.print(f"{out} is finished already: nothing to do")
            return out
        check = once(run / CHECK, lambda: checked(original, options, corpus))
        console.print(
            f"converted: logits within {check['as_original']:.1e} of the original's, "
            f"token by token within {check['decoding']:.1e} of all at once"
        )
        seed_everything(recipe.seed)
        model = convert(copy.deepcopy(original.model), options)
        if remember is not None:
            console.print(f"stage {REMEMBER}: scores of the tokens to keep, {recipe.remember.rows} rows")
            remember.run(model, console, args.process_index == 0)
        if recipe.full_layers:
            console.print(f"choosing {recipe.full_layers} layers that keep their attention")
            costs = once(run / REPLACED, lambda: replacement_costs(model, corpus, console.print))
            full = dearest(costs, recipe.full_layers)
            model = with_full_layers(original, model, options, full)
            console.print(f"layers {', '.join(map(str, full))} keep their attention")
        for number, stage in enumerate(stages, 1):
            console.print(f"stage {number} of {len(stages)}: {stage.name}, {stage.settings.steps} steps")
            if not stage.is_finished():
                open_latents(model, stages[0], recipe.opening)
            stage.run(model, console)
        round_to(model.requires_grad_(False).eval(), original.dtype)
        judged = texts(recipe, corpus, original)
        figures = judge(
            contenders(original, model, options, recipe),
            original.tokenizer,
            judged,
            recipe.judge,
            run / JUDGED,
            model.own_context,
            lambda what: console.print(f"measuring {what}"),
        )
        frontier = measure_frontier(
            original,
            model,
            options,
            recipe,
            remember,
            judged,
            run / FRONTIER,
            lambda what: console.print(f"measuring {what}"),
        )
        layers = {
            stage.name: {
                path.stem: json.loads(path.read_text())
                for path in (stage.folder / LAYERS_BEFORE, stage.folder / LAYERS)
                if path.is_file()
            }
            for stage in stages
        }
        results = {
            "recipe": asdict(recipe),
            "name": original.name,
            "check": check,
            "layers": layers,
            "remember": [] if remember is None else remember.figures(),
            "full_layers": model.config.full_layers or [],
            "progress": progress(stages),
            **figures,
            "frontier": frontier,
        }
        write_text(run / EXTENSION_RESULTS, json.dumps(results, indent=1) + "\n")
        if args.process_index == 0:
            with whole_folder(out, kind=KIND, recipe=_key(recipe)) as scratch:
                write_result(scratch, model, original, results, recipe)
    return out


@torch.no_grad()
def round_to(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Round weights to the type they will be saved in, so that what is measured is what is saved."""
    for parameter in model.parameters():
        parameter.copy_(parameter.to(dtype))


@contextmanager
def _nothing_left_of_a_refusal(run: Path) -> Iterator[None]:
    """Remove the run's folder if it is new and the extension is refused before anything was trained."""
    new = not run.exists()
    try:
        yield
    except UserError:
        if new and run.is_dir() and not any((*run.glob(f"*/{CHECKPOINTS}/*"), *run.glob(f"{REMEMBER}/*"))):
            remove(run)
        raise


def once(file: Path, measure: Callable[[], Any]) -> Any:
    """The measurement in ``file``, made now if there is none."""
    if not file.is_file():
        write_text(file, json.dumps(measure()) + "\n")
    return json.loads(file.read_text())


def checked(original: Original, options: dict[str, Any], corpus: Corpus) -> dict[str, float]:
    """Check the conversion on the first tokens of the corpus."""
    few = range(min(8, corpus.train.num_documents))
    ids = np.concatenate([corpus.train.document(index)[:TOKENS] for index in few]).astype(np.int64)
    return check_conversion(original.model.eval(), options, torch.from_numpy(ids))


def progress(stages: list[Stage]) -> dict[str, list[dict[str, float]]]:
    """The validations of each stage, by the number of tokens read until then, earlier stages included."""
    found: dict[str, list[dict[str, float]]] = {}
    before = 0
    for stage in stages:
        settings = stage.settings
        step_tokens = settings.batch_size * settings.sequence_length
        # By step, since a resumed run may have logged a step twice.
        by_step = {line["step"]: line for line in read_metrics(stage.folder) if "valid_loss" in line}
        found[stage.name] = [{"tokens": before + line.pop("step") * step_tokens, **line} for line in by_step.values()]
        before += settings.steps * step_tokens
    return found


def open_inputs(recipe: ExtendRecipe, console: Console) -> tuple[Original, Corpus]:
    """The pretrained model, and the corpus encoded with its tokenizer; what will be measured is checked as well."""
    if not recipe.model:
        raise UserError("no model was given: expected a folder, a name on the hub, a GGUF file, or smollm2-135m")
    if recipe.data.source == DataRecipe().source:
        console.print(
            "[bold]teaching on Python's own sources[/bold], the default: give --data.source for text like the model's"
        )
    original = load_original(recipe.model, console.print)
    check_full_layers(recipe.full_layers, original.model.config.num_hidden_layers)
    corpus = prepare(recipe.data, console.print, original.tokenizer)
    judged = texts(recipe, corpus, original)
    check_judge(recipe.judge, original.tokenizer, judged)
    check_frontier(recipe, judged, int(getattr(original.model.config, "max_position_embeddings", 0) or 0))
    return original, corpus


def mixer_options(recipe: ExtendRecipe) -> dict[str, Any]:
    """The recipe's settings as options of the mixer ``latte``."""
    return {
        "window": recipe.window,
        "sinks": recipe.sinks,
        "num_latents": recipe.latents,
        "feed": recipe.feed,
        "coupled": recipe.coupled,
        **({"kept": recipe.kept, "recall": recipe.remember.recall > 0} if recipe.kept else {}),
    }


def contenders(
    original: Original, model: LatteExtendedForCausalLM, options: dict[str, Any], recipe: ExtendRecipe
) -> list[Contender]:
    """The pretrained model, the same with window attention alone, with window and sinks, and the extended model."""
    limit = recipe.judge.original_up_to or 2 * model.own_context
    options = {**options, "kept": 0}
    sinks_too = convert(copy.deepcopy(original.model), options)
    alone = convert(copy.deepcopy(original.model), {**options, "sinks": 0})
    return [
        Contender(ORIGINAL, original.model.eval(), limit),
        Contender(WINDOW, alone.eval(), min(limit, model.own_context)),
        Contender(SINKS, sinks_too.eval()),
        Contender(EXTENDED, model),
    ]


def texts(recipe: ExtendRecipe, corpus: Corpus, original: Original) -> dict[str, Text]:
    """The texts to measure on: the validation part, the recipe's sources, and one long document."""
    judge, tokens = recipe.judge, corpus.valid
    asked = EvalRecipe(
        max_tokens=judge.max_tokens, max_document_tokens=judge.max_document_tokens, join_documents=judge.join_documents
    )

    def enough(read: Callable[[EvalRecipe], Text], asked: EvalRecipe) -> Text:
        text = read(asked)
        if sum(map(len, text.documents)) >= asked.max_tokens:
            return text
        return read(replace(asked, max_document_tokens=None))  # too few documents: read more of each

    def held_out(asked: EvalRecipe) -> Text:
        return take(tokens.documents(), original.tokenizer, asked)

    result = {VALIDATION: enough(held_out, asked)}
    for source in judge.sources:
        data = recipe.data
        settings = replace(asked, source=source, text_field=data.text_field, separator=data.separator)
        settings = replace(settings, encoding=data.encoding)
        result[judged_name(source)] = enough(lambda asked: read_text(asked, original.tokenizer), settings)
    if judge.long_contexts:
        size = max(judge.long_contexts)
        longest = max(range(tokens.num_documents), key=lambda index: len(tokens.document(index)))
        long = EvalRecipe(
            max_tokens=size, min_document_tokens=0 if judge.join_documents else min(size, len(tokens.document(longest)))
        )
        result[LONG] = held_out(replace(long, join_documents=judge.join_documents))
    return result


def write_result(
    folder: Path, model: LatteExtendedForCausalLM, original: Original, results: dict[str, Any], recipe: ExtendRecipe
) -> None:
    """Write the model, its tokenizer and card, the results as JSON, page and plots, and the recipe."""
    torch.nn.Module.to(model, original.dtype)  # transformers' own method loses its annotation
    if original.blocks is not None:
        use_blocks(model, original.blocks)
    model.save_pretrained(folder)
    save_tokenizer(original.tokenizer, folder)
    (folder / "README.md").write_text(model_card(original, model, results, recipe), encoding="utf-8")
    (folder / EXTENSION_RESULTS).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(render_results(results), encoding="utf-8")
    write_plots(results, folder)
    (folder / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")


def _require_free(out: Path, run: Path) -> None:
    if out.exists() and not run.is_dir():
        raise UserError(f"{out} exists already and was not begun by this command: give another --out")


def _key(recipe: ExtendRecipe) -> str:
    return digest_json({**asdict(recipe), "out": "", "dry_run": False})


def _is_done(out: Path, recipe: ExtendRecipe) -> bool:
    if not out.exists():
        return False
    try:
        manifest = verify_files(out, lambda file: file.endswith(READ))  # its page may be written again
    except Damaged as damage:
        raise UserError(f"{out} holds other files ({damage}): give another --out, or move it away") from None
    return manifest.get("kind") == KIND and manifest.get("recipe") == _key(recipe)
