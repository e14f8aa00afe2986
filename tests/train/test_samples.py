"""Training as it goes: samples, how long it will take, how much memory; none of it changes the result."""

import json
from pathlib import Path

import pytest

from latte.errors import UserError
from latte.loading import load
from latte.loading.layout import read_lines
from latte.recipe import TrainRecipe
from latte.report import build_report, render_report
from latte.train import train
from latte.train.samples import duration, sample_text
from tests.train.support import kill, weights


def test_samples_are_shown_kept_and_change_nothing(recipe, interrupted, capfd, whole):
    asked = {"sample_every": 4, "sample_prompt": "Document 3", "sample_tokens": 8}
    settings = recipe("sampled", **asked)
    with pytest.raises(RuntimeError):
        interrupted(settings, 10, kill)
    train(settings)
    said = capfd.readouterr().err
    lines = read_lines(Path(settings.out) / "samples.jsonl")
    assert [line["step"] for line in lines] == [4, 8, 12]
    assert all(line["prompt"] == "Document 3" and line["text"] for line in lines)
    assert f"step 4 writes: Document 3{lines[0]['text']}".splitlines()[0] in said
    assert weights(settings.out) == weights(whole.out)
    model, tokenizer = load(settings.out)
    ids = [tokenizer.bos_token_id, *tokenizer("Document 3", add_special_tokens=False)["input_ids"]]
    assert sample_text(model, tokenizer, ids, 8) == lines[-1]["text"]  # the weights of that step wrote it
    report = build_report(settings.out, measure=False, sample_tokens=0)
    assert [entry["step"] for entry in report.runs[0].progress] == [4, 8, 12]
    assert json.dumps(lines[0]["prompt"]) in render_report(report)


def test_time_and_memory_are_said_once_after_a_few_steps(recipe, capfd):
    train(recipe(steps=12))
    said = [line for line in capfd.readouterr().err.splitlines() if "steps left" in line]
    assert len(said) == 1
    assert "for the 6 steps left" in said[0]
    assert "MiB of memory" in said[0]


def test_durations_read_well():
    spoken = [duration(seconds) for seconds in (0.2, 89, 600, 7300)]
    assert spoken == ["1 s", "89 s", "10 min", "2 h 02 min"]


@pytest.mark.parametrize("settings", [{"sample_every": -1}, {"sample_tokens": 0}])
def test_bad_settings_of_samples(settings):
    with pytest.raises(UserError, match=f"train.{next(iter(settings))} is"):
        TrainRecipe(**settings)
