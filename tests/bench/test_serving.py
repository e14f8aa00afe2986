"""The figures of serving come with what they rest on: the same tokens."""

from __future__ import annotations

import json

from latte.bench.serving import ModelDraft, PromptLookup, measure_batching, measure_speculation, requests
from latte.cli.main import main
from tests.models.support import tiny_model


def test_batching_is_measured_by_a_command(tmp_path):
    assert main(["bench", "--suite", "batching", "--quick", "--out", str(tmp_path)]) == 0
    result, _ = json.loads((tmp_path / "batching.json").read_text())["results"].values()
    assert [figure["rows"] for figure in result["figures"]] == [1, 4]
    assert all(figure["same_tokens"] for figure in result["figures"])
    assert "tokens_per_second" in (tmp_path / "batching.md").read_text()


def test_requests_are_of_10_to_2000_tokens():
    lengths = sorted(len(request.ids) + request.max_new_tokens for request in requests(97))
    assert (len(lengths), lengths[0], lengths[-1]) == (32, 10, 2000)


def test_figures_of_batches_and_drafts():
    model = tiny_model("latte-r-swa++")
    figures = measure_batching(model, requests(97, 3, 30), (1, 3))["figures"]
    assert [figure["same_tokens"] for figure in figures] == [True, True]
    drafts = {"itself": lambda: ModelDraft(model), "lookup": PromptLookup}
    plain, itself, lookup = measure_speculation(model, [[1, 2, 3] * 3], drafts, 20, guesses=3)["figures"]
    assert plain["draft"] == "none"
    assert itself["acceptance"] == 1
    assert itself["same_tokens"]
    assert lookup["same_tokens"]
