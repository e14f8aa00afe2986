"""The comparison at equal memory of ``latte extend``: what it writes, what it measures again, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from latte.cli.main import main
from tests.workflows.test_extension import arguments, folder  # noqa: F401  (a fixture)
from tests.workflows.test_remembering import SETTINGS, refusal

FRONTIER = {
    **SETTINGS,
    "remember.rows": 2,
    "judge.max_tokens": 700,
    "judge.frontier": "[14,20]",
    "judge.frontier_context": 60,
    "judge.frontier_documents": 3,
    "judge.retrieval_trials": 1,
    "judge.retrieval_tasks": "[fact]",
}


def test_ways_are_compared_at_equal_memory_and_measured_once(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["extend", *arguments(folder, **FRONTIER)]) == 0
    found = json.loads((folder / "out" / "results.json").read_text())["frontier"]
    ways = [(row["way"], row["tokens"]) for row in found["rows"]]
    assert ways[:2] == [("original", None), ("window and sinks", 10)]
    assert ways[2:] == [
        *(("window", 14), ("kept", 14), ("oracle", 14), ("all together", 14)),
        *(("window", 20), ("kept", 20), ("oracle", 20), ("all together", 20)),
        ("latents", 10),
    ]
    rows = {way: row for way, row in zip(ways, found["rows"], strict=True)}
    assert found["documents"] == {"validation": 3}
    ends = [rows[way]["texts"]["validation"]["gap_closed"] for way in (("original", None), ("window and sinks", 10))]
    assert ends == [1.0, 0.0]
    assert rows["window", 14]["bytes"] < rows["kept", 14]["bytes"] < rows["kept", 20]["bytes"]
    assert set(rows["kept", 14]["recall"]) == {"0.1", "0.3", "0.5", "0.7", "0.9"}
    assert "recall" not in rows["oracle", 14]
    assert rows["oracle", 14]["bytes"] == rows["kept", 14]["bytes"]
    assert (folder / "out" / "frontier.png").is_file()
    capsys.readouterr()
    more = {**FRONTIER, "judge.frontier": "[14,20,24]"}
    (folder / "out").rename(folder / "before")
    assert main(["extend", *arguments(folder, **more)]) == 0
    measured = [line for line in capsys.readouterr().err.splitlines() if "measuring frontier" in line]
    assert measured
    assert all("24 tokens" in line for line in measured)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"judge.frontier": "[10]"}, "judge.frontier has 10, expected more than the 10 tokens of window and sinks"),
        ({"judge.frontier": "[60]"}, "judge.frontier has 60, expected more than the 10 tokens of window and sinks and"),
        ({"judge.frontier_context": 65}, "judge.frontier_context is 65, expected at most 64"),
        (
            {"judge.retrieval_tasks": "[riddle]"},
            "judge.retrieval_tasks has 'riddle', expected fact, four-facts",
        ),
        ({"judge.frontier_documents": 0}, "judge.frontier_documents is 0, expected at least 1"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    message: str,
) -> None:
    assert message in refusal(folder, {**FRONTIER, **changes}, capsys)
