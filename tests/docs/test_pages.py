"""The code in the README and the docs runs as it stands."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from latte.mixers import base
from tests.contract.checks import run_contract

ROOT = Path(__file__).parents[2]


def code_blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def test_the_quick_start_runs_and_is_ten_lines(capsys):
    (block,) = code_blocks("README.md")
    exec(compile(block, "README.md", "exec"), {"__name__": "quick_start"})
    assert "KiB of state" in capsys.readouterr().out
    assert len([line for line in block.splitlines() if line.strip()]) <= 10


@pytest.fixture
def example(monkeypatch):
    """The page's mixer, registered for this test alone."""
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))
    module = types.ModuleType("adding_a_mechanism")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look for their names
    namespace = vars(module)
    for block in code_blocks("docs/adding_a_mechanism.md"):
        exec(compile(block, "docs/adding_a_mechanism.md", "exec"), namespace)
    return namespace


def test_the_example_mechanism_generates(example):
    assert example["text"].shape == (1, 8)


def test_the_example_mechanism_keeps_the_contract(example):
    run_contract("lightning")
