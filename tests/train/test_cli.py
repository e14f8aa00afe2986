"""The command: recipes and overrides, help for every field, one sentence for every mistake, exit codes."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from latte.cli.main import main
from latte.recipe import Recipe, to_yaml


@pytest.fixture
def config(recipe, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(recipe(steps=3, save_every=0, eval_every=0)))
    return path


def test_a_recipe_with_overrides_trains_evaluates_and_generates(config, tmp_path, capsys):
    assert main(["train", "--config", str(config), "--train.steps", "2", "--out", str(tmp_path / "here")]) == 0
    assert "validation loss" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "here" / "config.yaml").read_text())["train"]["steps"] == 2
    arguments = ["eval", str(tmp_path / "here"), "--contexts", "[8, 50]", "--out", str(tmp_path / "eval.json")]
    assert main(arguments) == 0
    assert "loss by position" in capsys.readouterr().out
    assert [row["context"] for row in yaml.safe_load((tmp_path / "eval.json").read_text())["contexts"]] == [8, 50]
    assert main(["generate", str(tmp_path / "here"), "--prompt", "Document", "--max-new-tokens", "3"]) == 0


def test_text_in_another_encoding_is_evaluated_and_undecodable_bytes_are_said(config, tmp_path, capfd):
    assert main(["train", "--config", str(config), "--out", str(tmp_path / "here")]) == 0
    (tmp_path / "other.txt").write_bytes("Grüße aus Köln, wo man Latte trinkt.\n".encode("latin-1") * 9)
    losses = []
    for more in ([], ["--encoding", "latin-1"]):
        capfd.readouterr()
        out = tmp_path / "eval.json"
        source = ["--source", str(tmp_path / "other.txt"), "--contexts", "[8]", "--out", str(out)]
        assert main(["eval", str(tmp_path / "here"), *source, *more]) == 0
        assert ("27 bytes are not utf-8 in" in capfd.readouterr().err) == (not more)
        losses.append(yaml.safe_load(out.read_text())["contexts"][0]["loss"])
    assert losses[0] != losses[1]


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", "--help"])
    assert caught.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for part in ("data", "model", "train"):
        for field in dataclasses.fields({f.name: f for f in dataclasses.fields(Recipe)}[part].default_factory):
            assert f"--{part}.{field.name} " in said
    assert "Optimiser steps." in said
    assert "Documents are packed into rows and do not see each other." in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config", "nowhere.yaml"], "there is no recipe 'nowhere.yaml'"),
        (["--config", "dem"], "did you mean 'demo'?"),
        (["--train.step", "3"], "unknown setting train.step, did you mean train.steps?"),
        (["--train.steps", "many"], "train.steps is 'many', expected int"),
        (["--train.decay", "fast"], "train.decay is 'fast', expected one of"),
        (["--data.limit_bytes", "x"], "data.limit_bytes is 'x', expected int or null"),
        (["--train.steps", "0"], "train.steps is 0, expected at least 1"),
        (["--data.source", "nowhere.txt"], "there is no file or folder nowhere.txt"),
        (["--model.variant", "late"], "unknown variant 'late'"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing(config, tmp_path, capfd, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    first = [] if "--config" in arguments else ["--config", str(config)]
    before = sorted(tmp_path.iterdir())
    assert main(["train", *first, *arguments]) != 0
    said = capfd.readouterr()
    assert sentence in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert said.out == ""
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("train:\n  stepz: 4\n", "unknown setting train.stepz, did you mean train.steps?"),
        ("trian:\n  steps: 4\n", "unknown setting trian.steps, did you mean train.steps?"),
        ("train: [\n", "Problems parsing config"),
        ("train:\n  steps: four\n", "train.steps is 'four', expected int"),
    ],
)
def test_mistakes_in_a_file(tmp_path, capfd, text, sentence):
    (tmp_path / "bad.yaml").write_text(text)
    assert main(["train", "--config", str(tmp_path / "bad.yaml")]) != 0
    said = capfd.readouterr().err
    assert sentence in said
    assert len(said.strip().splitlines()) == 1


def test_sigterm_saves_and_exits_with_its_number(config, tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "latte.cli.main", "train", "--config", str(config), "--train.steps", "100000"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    metrics = Path(yaml.safe_load(config.read_text())["out"]) / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert "saved: the same command goes on" in said.splitlines()[-1]
    assert len(list((metrics.parent / "checkpoints").glob("step-*"))) == 1
