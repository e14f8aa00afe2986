"""Checkpoints: damaged ones are noticed, unfinished runs are read from the newest whole one, final models verified."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from latte.cli.main import main
from latte.errors import UserError
from latte.files import verify_folder
from latte.loading import load, load_folder
from latte.report import build_report
from latte.train import checkpoint, train
from tests.train.support import kill, timeless, weights


@pytest.fixture
def unfinished(recipe, interrupted):
    """A run that was killed after step 10, with checkpoints at steps 4 and 8."""
    settings = recipe("unfinished")
    with pytest.raises(RuntimeError):
        interrupted(settings, 10, kill)
    return Path(settings.out)


def damage(file):
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 4
    file.write_bytes(contents)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_a_damaged_checkpoint_is_noticed_and_the_one_before_it_used(recipe, interrupted, capfd, damage, whole):
    broken = recipe("broken")
    with pytest.raises(RuntimeError):
        interrupted(broken, 10, kill)
    path = checkpoint.path_of(Path(broken.out), 8)
    victim = path / ("manifest.json" if damage == "manifest" else "optimizer.safetensors")
    contents = bytearray(victim.read_bytes())
    contents[len(contents) // 2] ^= 4
    if damage == "remove":
        victim.unlink()
    else:
        victim.write_bytes(contents[: len(contents) // 3] if damage == "truncate" else contents)
    capfd.readouterr()
    train(broken)
    said = capfd.readouterr().err
    assert "checkpoint at step 8 is damaged" in said
    assert "going on from step 4 of 12" in said
    assert weights(broken.out) == weights(whole.out)
    assert timeless(broken.out) == timeless(whole.out)
    verify_folder(path)


def test_when_every_checkpoint_is_damaged_it_is_refused_with_the_way_on(recipe, unfinished, capfd, whole):
    for step in (4, 8):
        damage(checkpoint.path_of(unfinished, step) / "model.safetensors")
    before = sorted(unfinished.rglob("*"))
    with pytest.raises(UserError, match=r"no checkpoint of .* is whole \(2 damaged, the newest at step 8\): remove"):
        train(recipe("unfinished"))
    assert "one before it" not in capfd.readouterr().err
    assert sorted(unfinished.rglob("*")) == before
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged, and there is no final model"):
        load(str(unfinished))
    shutil.rmtree(unfinished / "checkpoints")
    train(recipe("unfinished"))
    assert weights(unfinished) == weights(whole.out)


def test_an_unfinished_run_is_used_from_its_newest_whole_checkpoint(unfinished, capfd):
    newest = safetensors.torch.load_file(checkpoint.path_of(unfinished, 8) / "model.safetensors")
    capfd.readouterr()
    for read in (load, load_folder):
        model, tokenizer = read(str(unfinished))
        assert len(tokenizer) == model.config.vocab_size
        assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in newest.items())
        assert capfd.readouterr().err == f"{unfinished} is not finished: using its checkpoint at step 8\n"
    damage(checkpoint.path_of(unfinished, 8) / "optimizer.safetensors")
    assert main(["generate", str(unfinished), "--prompt", "Document", "--max-new-tokens", "3"]) == 0
    said = capfd.readouterr().err
    assert "the checkpoint at step 8 is damaged" in said
    assert "using its checkpoint at step 4" in said
    assert main(["eval", str(unfinished), "--contexts", "[8]"]) == 0
    model, tokenizer = load(str(checkpoint.path_of(unfinished, 4)))  # a checkpoint by its own name
    assert len(tokenizer) == model.config.vocab_size


def test_an_unfinished_run_is_reported(unfinished):
    report = build_report(unfinished, measure=False, sample_tokens=4)
    assert report.runs[0].samples
    assert report.inspections
    assert any("is not finished: this is its checkpoint at step 8 of 12" in note for note in report.notes)


def test_a_run_without_a_checkpoint_says_so(recipe, interrupted):
    settings = recipe("young")
    with pytest.raises(RuntimeError):
        interrupted(settings, 2, kill)
    with pytest.raises(UserError, match="has no checkpoint yet"):
        load(settings.out)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json", "manifest.json"])
def test_a_damaged_final_model_is_not_used(recipe, capfd, file):
    settings = recipe(steps=2)
    train(settings)
    (Path(settings.out) / "model" / "notes.html").write_text("added files are no damage")
    load(settings.out)
    victim = Path(settings.out) / "model" / file
    if file == "model.safetensors":
        damage(victim)
    else:  # still readable, with another value
        text = victim.read_text()
        victim.write_text(text.replace("1", "2", 1))
        assert json.loads(victim.read_text())
    for command in (["generate", settings.out, "--prompt", "D"], ["eval", settings.out]):
        capfd.readouterr()
        assert main(command) == 1
        said = capfd.readouterr()
        assert f"model in {settings.out}/model is damaged (model/{file}" in said.err
        assert len(said.err.strip().splitlines()) == 1
        assert said.out == ""
    shutil.rmtree(Path(settings.out) / "model")
    train(settings)  # the way that the message names
    load(settings.out)
