"""The stage ``remember`` of ``latte extend``: results, restarts and mistakes."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from latte.cli.main import main
from latte.workflows.remembering import Remember
from tests.extend.families import small_model
from tests.workflows.test_extension import arguments, folder  # noqa: F401  (a fixture)

SETTINGS = {
    "kept": 6,
    "remember.rows": 5,
    "remember.sequence_length": 60,
    "remember.save_every": 2,
    "transfer.steps": 1,
    "distil.steps": 0,
    "lengthen.steps": 0,
    "judge.long_contexts": "[]",
    "judge.retrieval_contexts": "[]",
    "judge.decode_contexts": "[]",
    "judge.contexts": "[32]",
}


def scores(run: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run / "remember" / "scores" / "scores.safetensors")


def refusal(folder: Path, settings: dict[str, object], capsys: pytest.CaptureFixture[str]) -> str:  # noqa: F811
    """What a refused command prints; it leaves nothing behind."""
    assert main(["extend", *arguments(folder, **settings)]) != 0
    printed = " ".join(capsys.readouterr().err.split())
    assert "Traceback" not in printed
    assert not (folder / "out-run").exists()
    return printed


def test_scores_are_fitted_shown_and_saved_with_the_model(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["extend", *arguments(folder, **SETTINGS, **{"remember.recency": 0.5})])
    printed = capsys.readouterr().err
    assert "stage remember" in printed
    assert "row 5/5" in printed
    assert "layer 3/3  explained 0." in printed
    results = json.loads((folder / "out" / "results.json").read_text())
    assert [set(line) for line in results["remember"]] == 3 * [
        {"layer", "explained", "recency", "recall_r2", "captured"}
    ]
    assert all(0 < line["explained"] < 1 and line["recency"] == 0.5 for line in results["remember"])
    assert all(0 < line["recall_r2"] < 1 and 0 < line["captured"] < 1 for line in results["remember"])
    lines = [json.loads(line) for line in (folder / "out-run" / "remember" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    for name, value in scores(folder / "out-run").items():
        assert torch.equal(dict(model.named_parameters())[name], value)  # no later stage changes them
    assert {float(mixer.pretrained.score_recency.detach().mean()) for mixer in model.mixers} == {0.5}


def test_a_recency_is_fitted_for_every_head_by_default(folder: Path) -> None:  # noqa: F811
    main(["extend", *arguments(folder, **SETTINGS)])
    found = scores(folder / "out-run")
    recencies = torch.cat([value for name, value in found.items() if name.endswith("score_recency")])
    assert len(recencies.unique()) > 3
    assert (recencies > 0).all()


def test_without_recall_tokens_have_no_lifetimes(folder: Path) -> None:  # noqa: F811
    main(["extend", *arguments(folder, **SETTINGS, **{"remember.recall": 0, "remember.recency": 0})])
    assert not any("lifetime" in name for name in scores(folder / "out-run"))
    results = json.loads((folder / "out" / "results.json").read_text())
    assert [set(line) for line in results["remember"]] == 3 * [{"layer", "explained", "recency", "captured"}]


def test_a_stopped_pass_goes_on_and_ends_with_the_same_scores(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["extend", *arguments(folder, "whole", **SETTINGS)])
    row = Remember._row

    def killed(self: Remember, number: int) -> object:
        if number == 3:
            raise KeyboardInterrupt
        return row(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Remember, "_row", killed)
        assert main(["extend", *arguments(folder, **SETTINGS)]) != 0
    capsys.readouterr()
    main(["extend", *arguments(folder, **SETTINGS)])
    assert "going on from row 2 of 5" in capsys.readouterr().err
    expected, found = scores(folder / "whole-run"), scores(folder / "out-run")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert {path.name for path in (folder / "out-run" / "remember").iterdir() if path.is_dir()} == {"scores"}
    steps = (folder / "out-run" / "remember" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [1, 2, 3, 4, 5]


def test_scores_of_an_earlier_run_are_taken_if_they_are_of_the_same_model(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["extend", *arguments(folder, "first", **SETTINGS)])
    given = {**SETTINGS, "remember.scores": folder / "first-run" / "remember", "kept": 9}
    main(["extend", *arguments(folder, "second", **given)])
    expected, found = scores(folder / "first-run"), scores(folder / "second-run")
    assert expected.keys() == found.keys()
    for name in expected:  # another number of kept tokens: the share of those for recall is made anew
        if "score" in name:
            assert torch.equal(expected[name], found[name])
        elif name.endswith("lifetime_proj.weight"):
            torch.testing.assert_close(expected[name], found[name])
        elif name.endswith("lifetime_bias"):
            torch.testing.assert_close(expected[name] + math.log(9 / 6), found[name], atol=1e-4, rtol=1e-4)
        else:
            assert (found[name] < expected[name]).all(), "with more room tokens of lower scores are kept"
    capsys.readouterr()
    main(["extend", *arguments(folder, "plain", **{**SETTINGS, "remember.recall": 0})])
    without = {**SETTINGS, "remember.scores": folder / "plain-run" / "remember"}
    assert main(["extend", *arguments(folder, "fourth", **without)]) != 0
    assert "expected remember.recall 0, or other scores" in " ".join(capsys.readouterr().err.split())
    other = small_model("llama", seed=1)
    other.resize_token_embeddings(AutoModelForCausalLM.from_pretrained(folder / "pretrained").vocab_size)
    other.save_pretrained(folder / "pretrained")
    capsys.readouterr()
    assert main(["extend", *arguments(folder, "third", **given)]) != 0
    printed = capsys.readouterr().err
    assert "were fitted for another model" in printed
    assert "Traceback" not in printed
    assert not (folder / "third-run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kept": 54, "remember.sequence_length": 4096}, "kept is 54: with window and sinks that is 64 tokens"),
        ({"remember.sequence_length": 65}, "remember.sequence_length is 65, expected at most 64"),
        ({"remember.sequence_length": 17}, "expected more than 17, which window, sinks and kept tokens see"),
        ({"kept": 38}, "transfer.sequence_length is 48, expected more than 49, which window, sinks and kept"),
        ({"kept": -1}, "kept is -1, expected at least 0"),
        ({"remember.samples": 0}, "remember.samples is 0, expected at least 1"),
        ({"remember.rows": 0}, "remember.rows is 0, expected at least 1"),
        ({"remember.recall": 1.0}, "remember.recall is 1.0, expected a part of the kept tokens: from 0 to below 1"),
        ({"remember.recency": 0}, "remember.recall is 0.25 with remember.recency 0, expected a recency above 0"),
        ({"remember.scores": "nowhere"}, "there are no scores in nowhere"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    message: str,
) -> None:
    settings = {**SETTINGS, **changes}
    if settings["kept"] == 54:
        settings["transfer.sequence_length"] = 96
    assert message in refusal(folder, settings, capsys)


def test_a_bar_is_drawn_on_a_terminal() -> None:
    from latte.workflows.remembering import _shown

    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with _shown(console, "layer", 3, 1) as advance:
        advance("explained 0.500")
    assert "2/3" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "explained 0.500" in console.file.getvalue()  # type: ignore[attr-defined]
