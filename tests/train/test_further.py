"""Training further: a finished run made longer, and a new run from a model with its own tokenizer."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
from transformers import AutoTokenizer

from latte.cli.main import main
from latte.data import prepare
from latte.data.tokenizer import fingerprint
from latte.errors import UserError
from latte.loading import load
from latte.loading.layout import read_metrics, read_recipe
from latte.recipe import to_yaml
from latte.train import checkpoint, train
from tests.train.support import kill, weights


def longer(settings, steps):
    return replace(settings, train=replace(settings.train, steps=steps))


@pytest.mark.parametrize("where", ["finished", "killed"])
def test_a_constant_rate_made_longer_is_bitwise_one_long_run(recipe, interrupted, where):
    whole = recipe("whole", decay="constant", steps=20)
    train(whole)
    parts = recipe("parts", decay="constant", steps=11)
    if where == "killed":
        with pytest.raises(RuntimeError):
            interrupted(parts, 9, kill)
    else:
        assert train(parts).steps == 11
    with pytest.raises(RuntimeError):  # and made longer, it resumes like any other
        interrupted(longer(parts, 20), 14, kill)
    result = train(longer(parts, 20))
    assert weights(parts.out) == weights(whole.out)
    assert result.steps == 20
    assert result.schedules == [[0, 11], [8 if where == "killed" else 11, 20]]
    assert result.tokens == 20 * 4 * 24
    assert [line["step"] for line in read_metrics(Path(parts.out)) if "valid_loss" in line][-1] == 20
    assert read_recipe(parts.out).train.steps == 20
    assert train(longer(parts, 20)) == result


def test_a_falling_rate_goes_on_with_the_rates_of_the_new_length(recipe, capfd):
    settings = recipe(steps=8, log_every=1, learning_rate=0.01, warmup_steps=2, final_learning_rate_ratio=0.0)
    train(settings)
    capfd.readouterr()
    train(longer(settings, 16))
    assert "going on from step 8 of 16; the learning rate follows a schedule of 16 steps now" in " ".join(
        capfd.readouterr().err.split()
    )
    whole = recipe("whole", steps=16, log_every=1, learning_rate=0.01, warmup_steps=2, final_learning_rate_ratio=0.0)
    train(whole)
    mine, other = (
        {line["step"]: line["learning_rate"] for line in read_metrics(Path(run.out)) if "learning_rate" in line}
        for run in (settings, whole)
    )
    assert [mine[step] for step in range(9, 17)] == [other[step] for step in range(9, 17)]
    assert mine[7] != other[7]


def test_until_it_is_finished_again_the_newest_state_is_used(recipe, interrupted, capfd):
    settings = recipe(steps=8)
    train(settings)
    with pytest.raises(RuntimeError):
        interrupted(longer(settings, 20), 14, kill)
    capfd.readouterr()
    model, _ = load(settings.out)
    assert "not finished: using its checkpoint at step 12" in capfd.readouterr().err
    newest = safetensors.torch.load_file(checkpoint.path_of(Path(settings.out), 12) / "model.safetensors")
    assert all((model.state_dict()[name] == tensor).all() for name, tensor in newest.items())


def test_what_can_not_go_on_is_refused(recipe):
    settings = recipe(steps=8)
    train(settings)
    before = weights(settings.out)
    with pytest.raises(UserError, match=r"begun with train.steps 8, now 4: it may only grow"):
        train(longer(settings, 4))
    with pytest.raises(UserError, match=r"train.learning_rate was 0.001, now 0.5"):
        train(replace(longer(settings, 10), train=replace(settings.train, steps=10, learning_rate=0.5)))
    shutil.rmtree(Path(settings.out) / "checkpoints")
    with pytest.raises(UserError, match=r"was trained for 8 steps and keeps no checkpoint to go on from: .*pretrained"):
        train(longer(settings, 10))
    assert weights(settings.out) == before


def test_a_pretrained_model_is_trained_on_its_own_tokens(recipe, tmp_path, capfd):
    first = recipe("first", steps=2, data={"tokenizer": "bpe", "vocab_size": 300})
    train(first)
    tokenizer = AutoTokenizer.from_pretrained(Path(first.out) / "model")
    (tmp_path / "other.txt").write_text("an altogether different text, which has other pairs of letters. " * 200)
    config = tmp_path / "recipe.yaml"
    second = recipe("second", steps=1, data={"source": str(tmp_path / "other.txt"), "tokenizer": "auto"})
    config.write_text(to_yaml(second))
    assert main(["train", "--config", str(config), "--model.pretrained", first.out]) == 0
    for folder in ("tokenizer", "model"):
        used = AutoTokenizer.from_pretrained(Path(second.out) / folder)
        assert fingerprint(used) == fingerprint(tokenizer)
    again = prepare(read_recipe(second.out).data)  # what eval and report read
    assert json.loads((Path(second.out) / "data.json").read_text())["digest"] == again.digest
    assert fingerprint(again.tokenizer) == fingerprint(tokenizer)
    for asked in ("bytes", "bpe"):
        capfd.readouterr()
        arguments = ["--data.tokenizer", asked, "--out", str(tmp_path / "third")]
        assert main(["train", "--config", str(config), "--model.pretrained", first.out, *arguments]) == 1
        said = capfd.readouterr().err.strip()
        assert f"data.tokenizer is '{asked}', but the model {first.out} was trained with another tokenizer" in said
        assert len(said.splitlines()) == 1
    assert not (tmp_path / "third").exists()
    same = ["--data.tokenizer", str(Path(first.out) / "tokenizer"), "--out", str(tmp_path / "fourth")]
    assert main(["train", "--config", str(config), "--model.pretrained", first.out, *same]) == 0
