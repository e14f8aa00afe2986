"""The code in the README and the docs runs as it stands."""

from __future__ import annotations

import pkgutil
import re
import sys
import types
from pathlib import Path

import pytest

from latte.data.tokenizer import byte_tokenizer
from latte.extend import convert
from latte.mixers import registry
from latte.testing import check_mixer
from tests.extend.families import small_model

ROOT = Path(__file__).parents[2]


def code_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_quick_start_runs_and_is_ten_lines(capsys):
    block, _ = code_blocks("README.md")
    exec(compile(block, "README.md", "exec"), {"__name__": "quick_start"})
    assert "KiB of state" in capsys.readouterr().out
    assert len([line for line in block.splitlines() if line.strip()]) <= 10


def test_the_lines_for_an_extended_model_run(tmp_path, monkeypatch, capsys):
    """In a folder where ``smollm2-long`` is a small model that was extended."""
    _, block = code_blocks("README.md")
    tokenizer = byte_tokenizer()
    pretrained = small_model("llama")
    pretrained.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    convert(pretrained, {"window": 8, "sinks": 2, "num_latents": 4}).save_pretrained(tmp_path / "smollm2-long")
    tokenizer.save_pretrained(tmp_path / "smollm2-long")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "extended"})
    assert capsys.readouterr().out.startswith("Once upon a time")


@pytest.fixture
def example(monkeypatch):
    """The page's mixer, registered for this test alone."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    module = types.ModuleType("adding_a_mechanism")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look for their names
    namespace = vars(module)
    for block in code_blocks("docs/adding_a_mechanism.md"):
        exec(compile(block, "docs/adding_a_mechanism.md", "exec"), namespace)
    return namespace


def test_the_example_mechanism_generates_and_keeps_the_contract(example):
    assert example["text"].shape == (1, 8)
    assert example["check_mixer"] is check_mixer  # which ran


def test_the_code_of_the_page_on_generation_runs(capsys):
    blocks = code_blocks("docs/generation.md")
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "docs/generation.md", "exec"), {"__name__": "generation"})
    assert "guesses held" in capsys.readouterr().out


def test_the_site_is_built_by_make_test_and_names_what_is_there():
    """Every object that a page of the reference names can be imported; make docs fails on those that can't be found."""
    makefile = (ROOT / "Makefile").read_text()
    assert "test: lint types docs pytest" in makefile
    assert "mkdocs build --strict" in makefile
    names = [
        name
        for page in (ROOT / "docs" / "api").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
    ]
    assert len(names) > 20
    for name in names:
        assert pkgutil.resolve_name(name) is not None
