"""The versions of Python that are promised: the same in the metadata and in the README, this one among them."""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_metadata_and_readme_promise_the_same_pythons():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [name for name in project["classifiers"] if name.startswith("Programming Language :: Python :: 3.")]
    minors = sorted(int(name.rsplit(".", 1)[1]) for name in listed)
    assert minors == list(range(minors[0], minors[-1] + 1))
    assert project["requires-python"] == f">=3.{minors[0]},<3.{minors[-1] + 1}"
    readme = (ROOT / "README.md").read_text()
    assert f"(Python 3.{minors[0]} to 3.{minors[-1]})" in readme
    assert re.search(r"macOS and Windows are\s+untested", readme)
    assert sys.version_info.minor in minors
