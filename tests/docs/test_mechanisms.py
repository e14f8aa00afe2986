"""docs/mechanisms.md is what the registry and the measured figures say."""

import json
from pathlib import Path

from latte.bench import mechanisms
from latte.bench.figures import Plan
from latte.bench.machine import Peaks
from latte.mixers import names
from latte.report.gallery import CONTEXT, RESULTS, page

ROOT = Path(__file__).parents[2]


def test_the_gallery_is_what_the_registry_says():
    expected = page(ROOT / RESULTS)
    found = (ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")
    assert found == expected, "run python -m latte.report.gallery > docs/mechanisms.md"


def test_every_mechanism_has_a_row_and_a_section():
    text = page()
    for name in names():
        assert f"| [`{name}`](#{name}) |" in text
        assert f"\n## {name}\n" in text


def test_measured_figures_become_tokens_per_second(tmp_path):
    figures = [{"suite": "mechanisms", "name": "gla", "length": CONTEXT, "best": 0.5}, {"suite": "ops"}]
    (tmp_path / "results.json").write_text(json.dumps({"figures": figures}))
    rows = [row for row in page(tmp_path / "results.json").splitlines() if "](#" in row]
    last = {row.split("`")[1]: row.split(" | ")[-1] for row in rows}
    assert last["gla"] == "8,192 |"
    assert last["retnet"] == "- |"


def test_the_suite_trains_one_layer_of_every_mechanism():
    plan = Plan((8,), repeats=1, budget=0.1, longest=5.0, say=lambda line: None)
    figures = mechanisms.run(plan, Peaks(1e9, 1e9), "tiny")
    assert {figure.name for figure in figures} == set(names())
    assert all(figure.best for figure in figures), [f.skipped for f in figures if not f.best]
