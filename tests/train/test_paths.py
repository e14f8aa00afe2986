"""Runs are found from any folder: relative paths of a command become absolute in what is kept."""

import json
from pathlib import Path

import pytest

from latte.cli.main import main
from latte.errors import UserError
from latte.recipe import DataRecipe, ExtendRecipe, Recipe, anchored
from latte.train import train


def test_a_run_that_was_begun_with_relative_paths_works_elsewhere(make_recipe, corpus, tmp_path, monkeypatch, capfd):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "text.jsonl").write_bytes(corpus.read_bytes())
    monkeypatch.chdir(tmp_path / "here")
    recipe = make_recipe("run", data={"source": "text.jsonl"}, steps=2, save_every=0, eval_every=0)
    train(recipe)
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    assert main(["eval", "here/run", "--contexts", "8", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["contexts"][0]["context"] == 8
    (tmp_path / "here").rename(tmp_path / "there")  # the same text at another place is the same run
    monkeypatch.chdir(tmp_path / "there")
    train(recipe)
    (tmp_path / "there" / "text.jsonl").write_text(corpus.read_text().replace("words", "birds"))
    with pytest.raises(UserError, match="the text has changed"):
        train(recipe)


def test_only_what_is_on_disk_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("bpe", "python-stdlib", "text"):
        Path(name).mkdir()
    kept = anchored(Recipe(data=DataRecipe(valid_source="text", tokenizer="owner/name")))
    assert (kept.data.source, kept.data.tokenizer) == ("python-stdlib", "owner/name")
    assert kept.data.valid_source == str(tmp_path / "text")
    extension = ExtendRecipe(model="text")
    extension.judge.sources = ["text", "nowhere"]
    assert anchored(extension).judge.sources == [str(tmp_path / "text"), "nowhere"]
    assert anchored(extension).model == str(tmp_path / "text")
