"""Recall as a task of the trainer: the loss is of the queries alone, runs resume bitwise, comparisons show accuracy."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from latte.cli.main import main
from latte.errors import UserError
from latte.loading import load_folder
from latte.loading.layout import read_metrics
from latte.recipe import CompareRecipe, DataRecipe, ModelRecipe, RecallRecipe, Recipe, TrainRecipe
from latte.report import build_report, render_report
from latte.report.task_comparison import markdown, write
from latte.tasks import open_task
from latte.tasks.recall import answers
from latte.train import train
from latte.workflows import comparison
from latte.workflows.comparison import compare
from tests.train.support import kill, timeless, weights

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture
def recipe(tmp_path):
    def make(out="run", variant="latte-conv-swa++", **changes):
        few = {"num_latents": 4, "window": 4} if "latte" in variant else {}
        settings = {
            "out": str(tmp_path / out),
            "task": "recall",
            "data": DataRecipe(cache=str(tmp_path / "cache")),
            "recall": RecallRecipe([16, 24], [2, 3], vocab_size=32, examples=20, test_examples=10),
            "model": ModelRecipe(variant=variant, overrides={**SMALL, **few}),
            "train": TrainRecipe(steps=8, batch_size=4, warmup_steps=2, save_every=3, eval_every=4, eval_rows=8),
        }
        return Recipe(**{**settings, **changes})

    return make


@torch.no_grad()
def test_the_loss_is_that_of_the_queries(recipe):
    task = open_task(recipe())
    model = task.build_model().eval()
    batch = task.held_out.batch([0, 1, 2])
    ids, labels = (torch.from_numpy(part[:3].astype("int64")) for part in task.held_out.parts[0])
    asked = labels != -100
    logits = model(ids).logits[asked]  # the label stands at the query's own place there
    loss, right, count = answers(model, batch).tolist()
    assert count == 6
    assert loss / count == pytest.approx(float(F.cross_entropy(logits, labels[asked])), rel=1e-5)
    assert right == int((logits.argmax(-1) == labels[asked]).sum())


def test_a_killed_run_resumes_bitwise(recipe, interrupted):
    whole, broken = recipe("whole"), recipe("broken")
    result = train(whole)
    with pytest.raises(RuntimeError, match="pulled the plug"):
        interrupted(broken, 5, kill)
    assert train(broken).valid_accuracy == result.valid_accuracy
    assert weights(broken.out) == weights(whole.out)
    assert timeless(broken.out) == timeless(whole.out)
    last = read_metrics(Path(whole.out))[-1]
    assert {"valid_loss", "valid_accuracy", "valid_accuracy_16_2", "valid_accuracy_24_3"} <= last.keys()


def test_it_can_be_learned(recipe):
    """A model that sees all tokens learns the smallest case, so the labels are where they should be."""
    settings = recipe(
        "learned",
        "transformer++",
        recall=RecallRecipe([8], [1], vocab_size=12, examples=2000, test_examples=50),
        model=ModelRecipe(variant="transformer++", overrides={**SMALL, "hidden_size": 32, "initializer_range": 0.1}),
        train=TrainRecipe(steps=200, batch_size=32, warmup_steps=10, learning_rate=1e-2, eval_every=0, eval_rows=50),
    )
    assert train(settings).valid_accuracy > 0.9


def test_a_comparison_shows_accuracy_by_length_and_pairs(recipe, tmp_path, monkeypatch, capsys):
    one = recipe()
    settings = CompareRecipe(
        out=str(tmp_path / "compare"),
        variants=["latte-conv-swa++", "transformer++"],
        learning_rates=[1e-3, 3e-3],
        search_steps=8,
        task="recall",
        data=one.data,
        recall=one.recall,
        model=ModelRecipe(overrides={**SMALL, "num_latents": 4, "window": 4}),
        train=replace(one.train, steps=8),
        isolate=False,
    )
    trained = []
    monkeypatch.setattr(comparison, "train", lambda run: trained.append(run.out) or train(run))
    rows = compare(settings)
    for row in rows:
        assert [score["group"] for score in row.scores] == ["16, 2", "24, 3"]
        assert row.chance == 1 / 16
        assert row.accuracy == pytest.approx(sum(s["accuracy"] * s["count"] for s in row.scores) / (2 * 10 + 3 * 10))
        assert row.valid_loss == min(loss for _, loss in row.searched)  # the searched run itself: steps are all of them
    assert not any((Path(settings.out) / "search").glob("*/*"))
    written = write(rows, Path(settings.out))
    assert {path.name for path in written} == {"results.json", "table.md", "accuracy.png", "heat.png"}
    table = markdown(rows)
    assert "| 16, 2 | 24, 3 |" in table
    assert "| chance |" in table
    monkeypatch.setattr(comparison, "_train", lambda *args: pytest.fail("trained again"))
    assert compare(settings) == rows
    _, tokenizer = load_folder(Path(settings.out) / "transformer++")
    assert tokenizer.convert_ids_to_tokens([0, 3, 20]) == [".", "k3", "v20"]
    page = render_report(build_report(settings.out, measure=False))
    assert "trained to recall values by their keys" in page
    assert '"scores"' in page


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lengths": [16], "pairs": [5]}, "recall.lengths has 16 with 5 pairs, expected an even number of at least 20"),
        ({"lengths": [15], "pairs": [2]}, "recall.lengths has 15 with 2 pairs, expected an even number"),
        ({"lengths": [16, 32], "pairs": [2]}, "recall.pairs has 1 entries, expected 2"),
        ({"lengths": [16, 16], "pairs": [2, 2]}, "have a setting twice"),
        ({"lengths": [], "pairs": []}, "recall.lengths is empty"),
        ({"vocab_size": 100}, "recall.vocab_size is 100, expected more than 128"),
        ({"lengths": [8], "pairs": [2], "vocab_size": 9, "test_lengths": [8]}, "recall.test_pairs has 0 entries"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(UserError, match=message):
        RecallRecipe(**settings)


def test_too_few_examples_and_a_pretrained_model_are_refused(recipe, tmp_path, capsys):
    with pytest.raises(UserError, match=r"recall\.examples is 20, expected at least 32"):
        train(recipe(train=TrainRecipe(batch_size=32)))
    pretrained = recipe(model=ModelRecipe(pretrained=str(tmp_path)))
    with pytest.raises(UserError, match="task recall trains a new model"):
        train(pretrained)
    assert main(["train", "--task", "recall", "--recall.vocab_size", "9", "--out", str(tmp_path / "none")]) == 2
    assert "recall.vocab_size is 9, expected more than 64" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_the_use_of_latents_is_in_metrics_and_report(recipe):
    settings = recipe("latents")
    train(settings)
    lines = [line for line in read_metrics(Path(settings.out)) if "valid_loss" in line]
    figures = {f"latents_{name}_{layer}" for name in ("entropy", "dead", "overlap") for layer in (0, 1)}
    assert all(figures <= line.keys() for line in lines)
    assert len(lines) == 2
    assert '"collapse":{"entropy":[[0,' in render_report(build_report(settings.out, measure=False)).replace(" ", "")
