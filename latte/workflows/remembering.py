"""The stage ``remember``: fit the scores of tokens worth keeping, after one resumable pass over rows of text."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from latte.data import Batch, Corpus, PackedRows, prepare
from latte.errors import UserError
from latte.extend.attention_rate import fit_rate, sample
from latte.extend.layer import ExtendedMixer
from latte.extend.lifetimes import level_of, lifetimes
from latte.extend.model import LatteExtendedForCausalLM
from latte.extend.questions import Asked, with_questions
from latte.extend.remember import ScoreSums, add_asked, captured_attention, score_parameters
from latte.files import Damaged, remove, verify_folder, whole_folder, write_text
from latte.loading import Original
from latte.loading.layout import LAYERS, METRICS, read_metrics
from latte.recipe import ExtendRecipe
from latte.tokens import Tokens
from latte.workflows.samples import SampleFiles

NAME = "remember"
# Folders in the stage's: what was read so far, sums and samples of tokens, and what came of it.
SUMS, SAMPLES, SCORES = "sums", "samples", "scores"
WEIGHTS = "scores.safetensors"
KIND = "latte-scores-1"
SUM_NAMES = tuple(entry.name for entry in fields(ScoreSums))
Sums = dict[int, ScoreSums]  # by layer, of what recall needs
Visit = Callable[[ExtendedMixer, Tensor, Tokens], None]


@dataclass
class Remember:
    """The stage: its rows, of each text, and the folder of its scores."""

    recipe: ExtendRecipe
    folder: Path
    rows: list[PackedRows]
    held_out: PackedRows
    model_digest: str
    digests: list[str]  # of the texts besides the corpus
    encode: Callable[[str], list[int]]
    writes: bool = True

    def run(self, model: LatteExtendedForCausalLM, console: Console, writes: bool = True) -> None:
        """Fit the scores, resume, or load what is finished; afterwards the model keeps tokens by them.

        Of several processes all do the same, and one ``writes``.
        """
        self.writes = writes
        if self.is_finished():
            self._take(model, self.folder / SCORES)
        elif self.recipe.remember.scores is not None:
            self._take(model, given_scores(self.recipe.remember.scores))
            self.set_lifetimes(model)
            self._finish(model, None)
        else:
            with self._samples() as samples:
                sums = self._read_rows(model, console, samples)
                self._finish(model, self._solve(model, console, sums, samples))
                if writes:
                    samples.remove()
                    remove(self.folder / SUMS)

    def is_finished(self) -> bool:
        """Whether there are scores."""
        return (self.folder / SCORES).is_dir()

    def figures(self) -> list[dict[str, float]]:
        """R2 and captured attention of each layer."""
        path = self.folder / LAYERS
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []

    @torch.no_grad()
    def seconds(self, model: LatteExtendedForCausalLM) -> float:
        """About how long the pass takes here, by one whole row."""
        with tempfile.TemporaryDirectory() as folder:
            samples = SampleFiles(Path(folder))
            sums = self._no_sums(model)
            row = self._row(0)
            began = time.perf_counter()
            self._read(model, row, 0, sums, samples)
            return (time.perf_counter() - began) * self.recipe.remember.rows

    @contextmanager
    def _samples(self) -> Iterator[SampleFiles]:
        """The folder of samples; a process that does not write has one of its own."""
        if self.writes:
            yield SampleFiles(self.folder / SAMPLES)
            return
        with tempfile.TemporaryDirectory() as folder:
            yield SampleFiles(Path(folder))

    @torch.no_grad()
    def _read_rows(self, model: LatteExtendedForCausalLM, console: Console, samples: SampleFiles) -> Sums:
        settings = self.recipe.remember
        done, sums = self._resumed(model, samples)
        if self.writes:
            self.folder.mkdir(parents=True, exist_ok=True)
            before = [line for line in read_metrics(self.folder) if line["step"] <= done]
            write_text(self.folder / METRICS, "".join(json.dumps(line) + "\n" for line in before))
        if done:
            console.print(f"going on from row {done} of {settings.rows}")
        with _shown(console, "row", settings.rows, done) as advance:
            for row in range(done, settings.rows):
                self._read(model, self._row(row), row, sums, samples)
                samples.write(row)
                advance("")
                if not self.writes:
                    continue
                self._log(row + 1)
                if (row + 1) % settings.save_every == 0 and row + 1 < settings.rows:
                    self._save(sums, row + 1)
        return sums

    def _read(
        self,
        model: LatteExtendedForCausalLM,
        row: Batch | Asked,
        number: int,
        sums: Sums,
        samples: SampleFiles,
    ) -> None:
        """Take samples of a row and add it to the sums, in every layer that keeps tokens."""

        def visit(mixer: ExtendedMixer, x_BTD: Tensor, tokens: Tokens) -> None:
            if not mixer.pretrained.kept:
                return
            if isinstance(row, Asked):
                add_asked(sums[mixer.layer], mixer, x_BTD, tokens, row.asked)
                x_BTD = x_BTD[:, : row.asked]
                tokens = Tokens.of(x_BTD)
            samples.add(mixer.layer, sample(mixer, x_BTD, tokens, self.recipe.remember.samples, number))

        if isinstance(row, Asked):
            ids, reset = torch.from_numpy(row.ids)[None], None
        else:
            ids, reset = row["input_ids"], row["reset"].to(model.device)
        model.read_as("original", ids.to(model.device), reset=reset, visit=visit)

    def _row(self, number: int) -> Batch | Asked:
        """Row ``number``: texts in turn, rows of a text evenly spread over it. With questions it is one document."""
        source, count = self.rows[number % len(self.rows)], self.recipe.remember.rows
        nth, of = number // len(self.rows), -(-count // len(self.rows))
        batch = source.batch([min(nth * len(source) // of, len(source) - 1)])
        if not self.recipe.remember.recall:
            return batch
        return with_questions(batch["input_ids"][0].numpy(), self.encode, seed=number)

    def _no_sums(self, model: LatteExtendedForCausalLM) -> Sums:
        if not self.recipe.remember.recall:
            return {}
        return {
            mixer.layer: ScoreSums.empty(mixer.config.hidden_size, mixer.config.kv_heads, model.device)
            for mixer in model.mixers
            if mixer.pretrained.kept
        }

    def _resumed(self, model: LatteExtendedForCausalLM, samples: SampleFiles) -> tuple[int, Sums]:
        sums, folder = self._no_sums(model), self.folder / SUMS
        if not folder.is_dir():
            return 0, sums
        try:
            about = verify_folder(folder)
        except Damaged:
            remove(folder)
            return 0, sums
        if not samples.has(int(about["rows"])):
            return 0, sums
        found = safetensors.torch.load_file(folder / WEIGHTS, device=str(model.device))
        for layer in sums:
            sums[layer] = ScoreSums(**{name: found[f"{layer}.{name}"] for name in SUM_NAMES})
        return int(about["rows"]), sums

    def _save(self, sums: Sums, rows: int) -> None:
        tensors = {f"{layer}.{name}": value for layer, each in sums.items() for name, value in vars(each).items()}
        with whole_folder(self.folder / SUMS, rows=rows) as scratch:
            safetensors.torch.save_file(tensors, scratch / WEIGHTS)

    @torch.no_grad()
    def _solve(
        self, model: LatteExtendedForCausalLM, console: Console, sums: Sums, samples: SampleFiles
    ) -> dict[int, dict[str, float]]:
        """Set the scores of every layer; how well they fit, by layer."""
        settings = self.recipe.remember
        keeping = [mixer for mixer in model.mixers if mixer.pretrained.kept]
        found: dict[int, dict[str, float]] = {}
        with _shown(console, "layer", len(keeping), 0) as advance:
            for mixer in keeping:
                window, layer = mixer.pretrained, mixer.layer
                assert window.score_proj is not None
                assert window.score_recency is not None
                try:
                    rate = fit_rate(samples.of_layer(layer, settings.rows), settings.ridge, settings.recency)
                except ValueError as error:
                    raise UserError(
                        f"scores can't be fitted on {settings.rows} rows: {error}; give longer documents"
                    ) from error
                window.score_proj.weight.copy_(rate.weight_GD)
                window.score_recency.copy_(rate.recency_G)
                found[layer] = {
                    "explained": round(float(rate.explained_G.mean()), 6),
                    "recency": round(float(rate.recency_G.mean()), 6),
                }
                if window.lifetime_proj is not None:
                    weight_GD, r2_G = sums[layer].solve(settings.ridge)
                    window.lifetime_proj.weight.copy_(weight_GD)
                    found[layer]["recall_r2"] = round(float(r2_G.mean()), 6)
                advance(f"explained {found[layer]['explained']:.3f}")
        self.set_lifetimes(model)
        return found

    @torch.no_grad()
    def set_lifetimes(self, model: LatteExtendedForCausalLM) -> None:
        """Turn what tokens are worth for recall into lifetimes, by validation rows.

        They depend on how many tokens the model keeps: scores that were fitted for another number get others here.
        """
        settings = self.recipe.remember
        if not settings.recall:
            return
        seen: dict[int, list[tuple[Tensor, Tensor]]] = {}

        def visit(mixer: ExtendedMixer, x_BTD: Tensor, tokens: Tokens) -> None:
            window = mixer.pretrained
            if window.score_proj is not None and window.lifetime_proj is not None:
                x_ND = x_BTD[tokens.real_BT]
                seen.setdefault(mixer.layer, []).append((window.score_proj(x_ND), window.lifetime_proj(x_ND)))

        self._read_validation(model, visit)
        for layer, rows in seen.items():
            window = model.mixers[layer].pretrained
            assert window.lifetime_proj is not None
            assert window.lifetime_bias is not None
            assert window.recall_level is not None
            score_NG, worth_NG = (torch.cat(parts).float() for parts in zip(*rows, strict=True))
            slope_G, offset_G = lifetimes(worth_NG, settings.recall * window.kept)
            window.lifetime_proj.weight.mul_(slope_G[:, None])
            window.lifetime_bias.copy_(offset_G)
            assert window.score_recency is not None
            kept = (1 - settings.recall) * window.kept
            window.recall_level.copy_(level_of(score_NG, kept, window.score_recency.float()))

    def _finish(self, model: LatteExtendedForCausalLM, fits: dict[int, dict[str, float]] | None) -> None:
        if not self.writes:
            return
        captured = self._captured(model)
        figures = [
            {"layer": layer, **({} if fits is None else fits[layer]), "captured": round(share, 6)}
            for layer, share in captured.items()
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.folder / LAYERS, json.dumps(figures) + "\n")
        tensors = {name: value.detach().cpu() for name, value in score_parameters(model).items()}
        with whole_folder(self.folder / SCORES, kind=KIND, model=self.model_digest) as scratch:
            safetensors.torch.save_file(tensors, scratch / WEIGHTS)

    @torch.no_grad()
    def _captured(self, model: LatteExtendedForCausalLM) -> dict[int, float]:
        """By layer, the part of the attention behind window and sinks that kept tokens get, on validation rows."""
        totals: dict[int, list[float]] = {}

        def visit(mixer: ExtendedMixer, x_BTD: Tensor, tokens: Tokens) -> None:
            if mixer.pretrained.kept:
                behind, kept = captured_attention(mixer, x_BTD, tokens)
                total = totals.setdefault(mixer.layer, [0.0, 0.0])
                total[0], total[1] = total[0] + behind, total[1] + kept

        self._read_validation(model, visit)
        return {index: kept / max(behind, 1e-30) for index, (behind, kept) in sorted(totals.items())}

    def _read_validation(self, model: LatteExtendedForCausalLM, visit: Visit) -> None:
        """Read validation rows with the pretrained attention."""
        count = min(self.recipe.remember.eval_rows, len(self.held_out))
        for nth in range(count):
            batch = self.held_out.batch([nth * len(self.held_out) // count])
            ids, reset = (batch[name].to(model.device) for name in ("input_ids", "reset"))
            model.read_as("original", ids, reset=reset, visit=visit)

    def _take(self, model: LatteExtendedForCausalLM, folder: Path) -> None:
        """Load scores.

        Raises:
            UserError: damaged files, or scores of another model.
        """
        try:
            about = verify_folder(folder)
        except Damaged as damage:
            raise UserError(f"the scores in {folder} are damaged: {damage}") from None
        if about.get("model") != self.model_digest:
            raise UserError(
                f"the scores in {folder} were fitted for another model, expected ones of {self.recipe.model}"
            )
        found, parameters = safetensors.torch.load_file(folder / WEIGHTS), score_parameters(model)
        missing = sorted(parameters.keys() - found.keys())
        if missing:
            lifetimes_too = any("lifetime" in name for name in missing)
            hint = "remember.recall 0" if lifetimes_too else "a run that kept tokens in the same layers"
            raise UserError(f"the scores in {folder} have no {missing[0]}: expected {hint}, or other scores")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(found[name])

    def _log(self, row: int) -> None:
        line = {"step": row, "tokens": row * self.recipe.remember.sequence_length}
        with (self.folder / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def plan_remember(
    recipe: ExtendRecipe, corpus: Corpus, original: Original, folder: Path, say: Callable[[str], None]
) -> Remember | None:
    """The stage of a recipe that keeps tokens; None if it keeps none.

    Raises:
        UserError: more tokens than the model's context, or too little text.
    """
    if not recipe.kept:
        return None
    own = int(getattr(original.model.config, "max_position_embeddings", 0) or 0)
    settings, setting = recipe.remember, "remember.sequence_length"
    if own and recipe.attended > own:
        raise UserError(
            f"kept is {recipe.kept}: with window and sinks that is {recipe.attended - 1:,} tokens, expected fewer than "
            f"the {own:,} that the model was made for"
        )
    if own and settings.sequence_length > own:
        raise UserError(
            f"{setting} is {settings.sequence_length}, expected at most {own}, which the model was made for"
        )
    if settings.scores is not None:
        given_scores(settings.scores)
    more = [
        prepare(replace(recipe.data, source=source, valid_source=None), say, original.tokenizer)
        for source in settings.sources
    ]
    texts = [corpus.train, *(each.train for each in more)]
    rows = [PackedRows(text, settings.sequence_length, f"text for stage {NAME}", setting) for text in texts]
    held_out = PackedRows(corpus.valid, settings.sequence_length, f"validation part, for stage {NAME},", setting)

    def encode(text: str) -> list[int]:
        return list(original.tokenizer(text, add_special_tokens=False).input_ids)

    return Remember(recipe, folder / NAME, rows, held_out, original.digest, [each.digest for each in more], encode)


def given_scores(name: str) -> Path:
    """The folder of scores that an earlier run fitted.

    Raises:
        UserError: there are none.
    """
    for folder in (Path(name), Path(name) / SCORES):
        if (folder / WEIGHTS).is_file():
            return folder
    raise UserError(f"there are no scores in {name}: expected the folder OUT-run/{NAME} of an earlier run")


class _shown:  # noqa: N801  (used as a function)
    """A bar on a terminal, a line for each step elsewhere."""

    def __init__(self, console: Console, what: str, steps: int, done: int) -> None:
        self.console, self.what, self.steps, self.done = console, what, steps, done
        self.live: Progress | None = None

    def __enter__(self) -> Callable[[str], None]:
        if self.console.is_terminal:
            columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn())
            shown = TextColumn("{task.fields[shown]}")
            self.live = Progress(*columns, shown, TimeRemainingColumn(elapsed_when_finished=True), console=self.console)
            self.live.start()
            self.task = self.live.add_task(f"{NAME}, {self.what}", total=self.steps, completed=self.done, shown="")
        return self._advance

    def _advance(self, figure: str) -> None:
        self.done += 1
        if self.live is not None:
            self.live.update(self.task, completed=self.done, shown=figure)
        else:
            self.console.print(f"{self.what} {self.done}/{self.steps}  {figure}".rstrip(), highlight=False)

    def __exit__(self, *_: Any) -> None:
        if self.live is not None:
            self.live.stop()
