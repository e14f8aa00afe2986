"""docs/mechanisms.md is what the registry and the measured figures say."""

import json
from pathlib import Path

import pytest
import torch

from latte.bench import mechanisms
from latte.bench.figures import Plan
from latte.bench.machine import Peaks
from latte.bench.mechanism_peers import PEERS
from latte.mixers import names
from latte.models.presets import example_layer
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
    best = {"gla": 0.5, "mamba": 0.25}
    figures = [{"suite": "mechanisms", "name": name, "length": CONTEXT, "best": best[name]} for name in best]
    figures += [{"suite": "mechanisms", "name": "mamba (transformers)", "length": CONTEXT // 4, "best": 0.75}]
    figures += [{"suite": "ops"}, {"suite": "mechanisms", "name": "kda", "length": CONTEXT, "skipped": "too long"}]
    (tmp_path / "results.json").write_text(json.dumps({"figures": figures}))
    rows = [row for row in page(tmp_path / "results.json").splitlines() if "](#" in row]
    last = {row.split("`")[1]: row.split(" | ")[-2:] for row in rows}
    assert last["gla"] == ["8,192", "- |"]
    assert last["mamba"] == ["16,384", "12.0 |"]
    assert last["retnet"] == last["kda"] == ["-", "- |"]


def test_sections_say_what_takes_the_time(tmp_path):
    best = {"gla": 0.1, "log-linear-mamba2": 0.38, "rwkv6": 0.9, "softmax": 0.2}
    best |= {"lightning": 0.1, "lightning (transformers)": 0.3, "lightning (projections)": 0.08}
    best |= {"kda": 0.1, "kda (transformers)": 0.6, "kda (projections)": 0.08}
    figures = [{"suite": "mechanisms", "name": name, "length": CONTEXT, "best": best[name]} for name in best]
    (tmp_path / "results.json").write_text(json.dumps({"figures": figures}))
    sections = dict(part.split("\n", 1) for part in page(tmp_path / "results.json").split("\n## ")[1:])
    assert "take 80% of its training time" in sections["lightning"]
    assert "it would be 3.8 times as fast" in sections["lightning"]
    assert "0.26 of `gla`'s tokens/s" in sections["log-linear-mamba2"]
    assert "its arithmetic demands it" in sections["log-linear-mamba2"]
    assert "does not demand that" in sections["rwkv6"]
    assert not any(
        "training time" in sections[name] or "tokens/s" in sections[name] for name in ("kda", "softmax", "h3")
    )


def test_the_suite_trains_one_layer_of_every_mechanism():
    plan = Plan((8,), repeats=1, budget=0.1, longest=5.0, say=lambda line: None)
    figures = mechanisms.run(plan, Peaks(1e9, 1e9), "tiny")
    beside = {f"{name} ({what})" for name in PEERS for what in ("transformers", "projections")}
    assert {figure.name for figure in figures} == set(names()) | beside
    ours = [figure for figure in figures if figure.ours]
    assert all(figure.best for figure in ours), [f.skipped for f in ours if not f.best]


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_has_the_sizes_of_ours(name):
    """As many parameters, but for parts that only one of them has: Longformer's output projection, MiniMax's gates."""
    ours = example_layer(name, "small")
    theirs, call = PEERS[name](ours)
    count = [sum(parameter.numel() for parameter in module.parameters()) for module in (ours, theirs)]
    assert count[1] == pytest.approx(count[0], rel=0.0 if name not in ("longformer", "lightning") else 0.2)
    assert call(torch.zeros(1, 128, ours.config.hidden_size)).shape == (1, 128, ours.config.hidden_size)
