"""What is installed: a wheel for every Python, typed, and without what only some uses need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from latte import extras
from latte.errors import UserError

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

#: Importing the names in EXTRAS fails in this process, as where they are not installed.
WITHOUT_EXTRAS = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError("No module named " + name, name=name)
sys.meta_path.insert(0, Missing())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {names!r} else found(name, package)
import datasets, accelerate, transformers  # they look for these packages too, in ways of their own
"""


def without_extras(code: str, tmp_path: Path) -> str:
    start = WITHOUT_EXTRAS.format(names=sorted(extras.EXTRAS))
    done = subprocess.run(
        [sys.executable, "-c", start + code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


def test_the_wheel_is_for_every_python_of_the_platform(tmp_path):
    """Built as pip builds it, but without a compiler: the tag does not depend on the library being there."""
    project, out = tmp_path / "project", tmp_path / "out"
    project.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "latte_cli.py"):
        shutil.copy(ROOT / name, project / name)
    shutil.copytree(ROOT / "latte", project / "latte", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    environment = {**os.environ, "CC": "false", "CXX": "false"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = out.iterdir()
    python, abi, platform = wheel.stem.split("-")[-3:]
    assert (python, abi) == ("py3", "none")
    assert platform != "any", "the library is of one platform"
    with zipfile.ZipFile(wheel) as file:
        assert "latte/py.typed" in file.namelist()
        metadata = next(file.read(name).decode() for name in file.namelist() if name.endswith("METADATA"))
    for package, extra in extras.EXTRAS.items():
        (line,) = [line for line in metadata.splitlines() if line.startswith(f"Requires-Dist: {package}")]
        assert line.endswith(f'extra == "{extra}"')


def test_every_extra_is_left_out_of_what_everyone_installs():
    def names(requirements: list[str]) -> set[str]:
        return {requirement.split(">")[0].split("=")[0].split("[")[0] for requirement in requirements}

    project = PROJECT["project"]
    optional = project["optional-dependencies"]
    assert not names(project["dependencies"]) & extras.EXTRAS.keys()
    for package, extra in extras.EXTRAS.items():
        assert package in names(optional[extra]), (package, extra)
    common = sorted({*extras.EXTRAS.values()} - {"tasks"})  # lm-eval brings forty packages
    assert optional["all"] == [f"{project['name']}[{','.join(common)}]"]
    assert "[dev,docs,all]" in (ROOT / "Makefile").read_text()
    assert project["urls"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "latte" / "py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["latte"]


def test_training_needs_no_extra(tmp_path):
    (tmp_path / "text.txt").write_text("one two three four\n" * 400)
    code = """
from latte.cli.main import main
code = main(["train", "--out", "run", "--data.source", "text.txt", "--data.tokenizer", "bytes", "--data.cache", "cache",
    "--data.sequence_length", "16", "--model.overrides", 
    "{hidden_size: 16, num_hidden_layers: 1, intermediate_size: 16}", "--train.steps", "2", "--train.batch_size", "2"])
assert code == 0
from latte.errors import UserError
from latte.loading.pretrained import load_original
open("model.gguf", "wb").write(b"GGUF")
try:
    load_original("model.gguf", print)
except UserError as error:
    print("said:", error)
"""
    said = without_extras(code, tmp_path)
    assert "no files for TensorBoard, which is not installed: pip install 'latte-attention[tensorboard]'" in said
    assert "said: a .gguf file needs gguf, which is not installed: pip install 'latte-attention[extend]'" in said
    assert (tmp_path / "run").is_dir()


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setattr(extras, "installed", lambda name: False)
    with pytest.raises(UserError, match=r"^a plot needs matplotlib, which is not .*\[report\]'$"):
        extras.need("matplotlib.figure", "a plot")
