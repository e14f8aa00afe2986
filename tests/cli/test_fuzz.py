"""Command lines and recipes with mistakes: one sentence, the right exit code, no traceback, nothing written."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from latte.cli.main import COMMANDS, main
from latte.cli.words import setting_types
from latte.data.tokenizer import byte_tokenizer
from tests.cli import fuzz
from tests.eval.test_generate import make
from tests.extend.families import small_model

COUNT = int(os.environ.get("LATTE_FUZZ_CASES", "1400"))
BATCH = 100


@cache
def all_cases():
    return fuzz.cases(COUNT)


def check(case, code, out, err, made):
    """What holds for every case."""
    assert code in ((2,) if case.wrong else (0, 2)), case
    assert "Traceback" not in err
    assert not made, (case, made)
    if code:
        assert err.startswith(f"latte {case.command}: "), (case, err)
        assert (out, len(err.splitlines())) == ("", 1), (case, out, err)


def listing(folder):
    return sorted(str(path) for path in Path(folder).rglob("*"))


@pytest.mark.parametrize("first", range(0, COUNT, BATCH))
def test_fuzzed_command_lines_and_recipes(first, tmp_path, monkeypatch, capsys):
    """All is read and validated as in a real call; only the run itself is left out."""
    cases = all_cases()[first : first + BATCH]
    for command in COMMANDS:
        monkeypatch.setattr(importlib.import_module(f"latte.cli.{command}"), "run", lambda *given: 0)
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        fuzz.write_files(case, folder)
        monkeypatch.chdir(folder)
        before = listing(folder)
        code = main([case.command, *case.arguments])
        said = capsys.readouterr()
        check(case, code, said.out, said.err, set(listing(folder)) - set(before))


def test_the_cases_reach_every_setting_of_every_command():
    every = {(command, name) for command in COMMANDS for name in setting_types(fuzz.kind_of(command))}
    reached = {(case.command, case.about.rpartition(" ")[2]) for case in all_cases() if case.wrong}
    assert every - reached == set()
    assert sum(case.wrong for case in all_cases()) >= COUNT // 2
    assert fuzz.cases(50) == fuzz.cases(50)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_that_are_mutated_are_accepted(command, tmp_path, monkeypatch, capsys):
    """Or else a refusal would say nothing about the mutation."""
    case = fuzz.Case(command, fuzz.example_of(command))
    fuzz.write_files(case, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module(f"latte.cli.{command}"), "run", lambda *given: 0)
    assert main([command, *case.arguments]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("number", range(0, COUNT, COUNT // 24))
def test_fuzzed_processes(number, tmp_path):
    """Real processes, of cases that must be refused."""
    wrong = [case for case in all_cases() if case.wrong]
    case = wrong[number % len(wrong)]
    fuzz.write_files(case, tmp_path)
    before = listing(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "latte_cli", case.command, *case.arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    check(case, done.returncode, done.stdout, done.stderr, set(listing(tmp_path)) - set(before))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model of ours, one to extend, and a text."""
    folder = tmp_path_factory.mktemp("fuzz")
    make().save_pretrained(folder / "ours")
    pretrained = small_model("llama")
    pretrained.resize_token_embeddings(257, mean_resizing=False)
    pretrained.save_pretrained(folder / "theirs")
    for name in ("ours", "theirs"):
        byte_tokenizer().save_pretrained(folder / name)
    (folder / "text.txt").write_text("some words to learn from, and more of them\n\n" * 400)
    (folder / "nothing").mkdir()
    return folder


TRAIN = ["train", "--data.source", "text.txt", "--out", "made"]
COMPARE = ["compare", "--data.source", "text.txt", "--out", "made"]
EXTEND = ["extend", "theirs", "--data.source", "text.txt", "--out", "made"]
EXTEND += ["--window", "8", "--transfer.sequence_length", "32", "--distil.sequence_length", "32"]
EXTEND += ["--transfer.steps", "1", "--distil.steps", "1", "--judge.long_contexts", "[]"]


@pytest.mark.parametrize(
    "arguments",
    [
        [*TRAIN, "--data.source", "nowhere.txt"],
        [*TRAIN, "--data.source", "nothing"],
        [*TRAIN, "--data.valid_source", "nowhere.txt"],
        [*TRAIN, "--data.tokenizer", "./nowhere"],
        [*TRAIN, "--data.format", "parquet"],
        [*TRAIN, "--data.format", "jsonl"],
        [*TRAIN, "--data.limit_bytes", "1"],
        [*TRAIN, "--model.variant", "late"],
        [*TRAIN, "--model.size", "huge"],
        [*TRAIN, "--model.overrides", "{no_such_field: 3}"],
        [*TRAIN, "--model.overrides", "{hidden_size: 7}"],
        [*TRAIN, "--model.overrides", "{window: many}"],
        [*TRAIN, "--model.overrides", "{num_hidden_layers: -1}"],
        [*TRAIN, "--model.pretrained", "./nowhere"],
        [*TRAIN, "--model.pretrained", "nothing"],
        [*TRAIN, "--out", "text.txt"],
        [*TRAIN, "--out", "text.txt/below"],
        [*COMPARE, "--variants", "latte++", "late"],
        [*COMPARE, "--match", "late"],
        [*COMPARE, "--model.size", "huge"],
        [*COMPARE, "--overrides", "{'latte-r-swa++': {no_such_field: 3}}"],
        [*COMPARE, "--data.source", "nowhere.txt"],
        [*EXTEND, "--judge.sources", "nowhere.txt"],
        [*EXTEND, "--judge.contexts", "[0]"],
        [*EXTEND, "--data.source", "nowhere.txt"],
        [*EXTEND, "--model", "nothing"],
        ["extend", "nothing", "--data.source", "text.txt", "--out", "made"],
        ["extend", "text.txt", "--data.source", "text.txt", "--out", "made"],
        ["eval", "nothing", "--source", "text.txt", "--out", "made"],
        ["eval", "ours", "--source", "nowhere.txt", "--out", "made"],
        ["eval", "ours", "--source", "text.txt", "--tokenizer", "./nowhere", "--out", "made"],
        ["eval", "ours", "--source", "text.txt", "--out", "text.txt/below"],
        ["generate", "nothing", "--prompt", "x"],
        ["generate", "ours", "--prompt_file", "nowhere.txt"],
        ["generate", "ours", "--load_state", "nothing"],
        ["generate", "ours", "--prompt", "x", "--save_state", "nothing"],
        ["chat", "ours", "--state", "nothing"],
        ["read", "ours", "--file", "nothing", "--out", "made"],
        ["report", "nothing", "--out", "made"],
        ["report", "nowhere", "--out", "made"],
        ["report", "ours", "--out", "nothing"],
        ["inspect", "ours", "--text", "some", "--out", "text.txt/below"],
        ["inspect", "ours", "--text", "x", "--file", "text.txt", "--out", "made"],
        ["inspect", "ours", "--file", "nowhere.txt", "--out", "made"],
        ["inspect", "nothing", "--text", "some", "--out", "made"],
        ["bench", "--suite", "no-such-suite", "--out", "made"],
    ],
    ids=" ".join,
)
def test_mistakes_that_only_a_run_can_find_are_found_before_its_work(arguments, models, monkeypatch, capfd):
    """Nothing is replaced here: each is refused by the command as it is, and leaves nothing behind."""
    monkeypatch.chdir(models)
    monkeypatch.setenv("LATTE_CACHE", str(models.parent / "cache"))
    before = listing(models)
    code = main(arguments)
    said = capfd.readouterr()
    assert code in (1, 2), said
    assert "Traceback" not in said.err
    sentence = said.err.splitlines()[-1]
    assert sentence.startswith(f"latte {arguments[0]}: "), said.err
    assert said.out == ""
    assert listing(models) == before
