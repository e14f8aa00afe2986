"""Tables of a comparison, and what they say about the first model: who is ahead, by how much, and how surely."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from latte.eval.comparison import Row
from latte.report.build import build_report, render_report
from latte.report.comparison import columns, markdown, write
from latte.report.verdict import losses_to_others
from tests.report.support import make_run, page_data


def at(context, *parts):
    loss = sum(parts) / len(parts)
    error = None if len(parts) < 2 else 0.1
    return {
        "context": context,
        "tokens": 9,
        "loss": loss,
        "perplexity": 2.0,
        "bits_per_byte": 1.0,
        "parts": list(parts),
        "standard_error": error,
    }


def row(name, short, long, **changes):
    made = Row(
        name=name,
        parameters=1000,
        tokens=64,
        valid_loss=1.0,
        perplexity=2.0,
        bits_per_byte=1.0,
        peak_memory_bytes=3 << 20,
        state_bytes=2048,
        contexts=[at(8, *short), at(64, *long)],
        positions=[],
        trained_context=8,
        train_tokens_per_second=100.0,
        decode_tokens_per_second=50.0,
        decode_engine="kernel",
        module_tokens_per_second=10.0,
        load_average=0.5,
    )
    return replace(made, **changes)


OWN = row("own", (2.0, 2.0, 2.0, 2.0), (3.0, 3.0, 3.0, 3.0))


def test_who_is_ahead_and_by_how_much():
    rows = [
        OWN,
        # The difference is the same in every part: sure, however far the parts are from each other.
        row("surely", (1.5, 1.5, 1.5, 1.5), (4.0, 4.0, 4.0, 4.0), train_tokens_per_second=250.0, state_bytes=512),
        # -0.1 on average, with parts of -1.1 to 0.9: within the error.
        row("perhaps", (0.9, 2.9, 0.9, 2.9), (3.0, 3.0, 3.0, 3.0), module_tokens_per_second=11.0),
        row("behind", (2.5, 2.5, 2.5, 2.5), (3.5, 3.5, 3.5, 3.5), peak_memory_bytes=9 << 20, state_bytes=4096),
    ]
    points = dict(losses_to_others(rows))
    assert points["Loss at the trained length of 8 tokens"] == (
        "(2.0000, place 3 of 4): lower are surely by 0.5000 ± 0.0000; by less than 2 standard errors of the "
        "difference: perhaps by 0.1000 ± 0.5774."
    )
    assert points["Loss at 64 tokens"] == "(3.0000, place 1 of 4): none is lower."
    assert points["Training speed"] == "(100 tokens/s, place 2 of 4): times as fast are surely 2.50."
    assert points["Writing speed"] == "(50 tokens/s, place 1 of 4): none is faster."
    assert points["Writing speed by modules"] == "(10 tokens/s, place 2 of 4): times as fast are perhaps 1.10."
    assert points["State"] == "(2.0 KiB, place 2 of 4): times as small are surely 4.00."
    assert points["Peak memory of training"] == "(3 MiB, place 1 of 4): none is smaller."
    assert "- **Training speed** (100 tokens/s, place 2 of 4)" in markdown(rows)


def test_only_models_that_read_as_far_are_compared_there():
    short = replace(row("short", (1.0,) * 4, (1.0,) * 4), contexts=[at(8, 1.0, 1.0, 1.0, 1.0)])
    points = dict(losses_to_others([OWN, short]))
    assert "lower are short" in points["Loss at the trained length of 8 tokens"]
    assert points["Loss at 64 tokens"] == "(3.0000, place 1 of 1): none is lower."


def test_one_model_loses_nothing():
    assert losses_to_others([OWN]) == []
    assert "loses" not in markdown([OWN])


def test_columns_of_what_there_is():
    assert "rate" not in columns([OWN])
    assert "sizes" not in columns([OWN])
    searched = replace(
        OWN,
        learning_rate=0.01,
        searched=[[0.001, 3.0], [0.01, 2.5], [0.1, None]],
        sizes={"hidden_size": 120, "num_hidden_layers": 10},
    )
    forms = columns([searched, OWN])
    assert forms["rate"](searched) == "0.01"
    assert forms["rate"](replace(searched, learning_rate=0.001)) == "0.001!"
    assert forms["sizes"](searched) == "10 layers, width 120"
    assert forms["loss at longest"](searched) == "3.0000 ± 0.1000 at 64"
    assert "| own | 3.0000 | **2.5000** | not finite |" in markdown([searched, OWN])


@pytest.mark.parametrize("count", [2, 12])
def test_plots_of_few_and_of_many(tmp_path: Path, count):
    rows = [replace(OWN, name=f"m{index}", train_tokens_per_second=None) for index in range(count)]
    rows[0] = OWN
    for path in write(rows, tmp_path):
        assert path.stat().st_size > 100


def test_the_page_says_it_too(tmp_path: Path):
    for name in ("own", "surely"):
        make_run(tmp_path / name, finished=False)
    rows = [OWN, row("surely", (1.5,) * 4, (4.0,) * 4)]
    (tmp_path / "results.json").write_text(json.dumps([asdict(row) for row in rows]))
    losses = page_data(render_report(build_report(tmp_path, measure=False)))["losses"]
    assert losses["name"] == "own"
    assert ["Loss at 64 tokens", "(3.0000, place 1 of 2): none is lower."] in losses["points"]
    (tmp_path / "results.json").write_text(json.dumps([{"name": "own"}, {"name": "surely"}]))  # of an earlier version
    assert page_data(render_report(build_report(tmp_path, measure=False)))["losses"] is None
