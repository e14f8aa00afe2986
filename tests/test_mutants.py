"""The mutants of scripts/mutants.py still apply; running them is `python scripts/mutants.py`."""

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
mutants = importlib.import_module("mutants")


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.what)
def test_the_text_to_replace_stands_exactly_once(mutant):
    text = (mutants.ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1
    assert mutant.new != mutant.old
    if mutant.file.endswith(".py"):
        compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    assert all((mutants.ROOT / part).exists() for part in mutant.tests if part.startswith("tests"))


def test_there_are_enough_mutants_and_none_twice():
    assert len(mutants.MUTANTS) >= 24
    assert len({mutant.what for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS)


def test_a_stale_mutant_is_refused(tmp_path):
    (tmp_path / "x.py").write_text("a = 1\na = 1\n")
    for old in ("a = 1", "b = 2"):
        with pytest.raises(ValueError, match="times, expected once"):
            mutants.apply(mutants.Mutant("stale", "x.py", old, "a = 2", ()), tmp_path)
