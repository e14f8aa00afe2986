"""Reports say what the run folders hold, and mistakes in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from latte.cli.main import main
from latte.errors import UserError
from latte.report import build_report, find_runs, inspect_text, latent_use, read_run, render_report
from latte.report.build import _write
from latte.report.cost import measure_cost
from tests.report.browser import browser, missing
from tests.report.support import TEXT, make_run, model, page_data, saved, tokenizer


def evaluation(folder: Path) -> None:
    contexts = [
        {"context": 16, "tokens": 9, "loss": 3.5, "perplexity": 33.1, "bits_per_byte": 2.0, "state_bytes": 9},
        {"context": 32, "tokens": 9, "loss": 3.25, "perplexity": 25.8, "bits_per_byte": 1.9, "state_bytes": 9},
        {"context": 256, "tokens": 9, "loss": 3.0, "perplexity": 20.1, "bits_per_byte": 1.8, "state_bytes": 9},
    ]
    positions = [{"first": 1, "last": 1, "tokens": 3, "loss": 5.0}, {"first": 2, "last": 8, "tokens": 3, "loss": 3.5}]
    (folder / "eval.json").write_text(json.dumps({"contexts": contexts, "positions": positions}))


def test_a_run_is_read_from_its_files(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", finished=False)
    evaluation(folder)
    run = read_run(folder)
    assert run.train == [(1280, 4.5), (2560, 4.0), (3840, 3.5), (5120, 3.0)]
    assert run.valid == [(5120, 3.25)]
    assert run.context == [(16, 3.5), (32, 3.25), (256, 3.0)]
    assert run.positions == [(1, 5.0), (4, 3.5)]
    assert run.at_training["bits_per_byte"] == 1.9
    assert run.row["valid_loss"] == 3.25
    assert run.row["tokens"] == 5120


def test_a_comparison_is_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for variant in ("latte-r-swa++", "transformer++"):
        evaluation(make_run(tmp_path / "both" / variant, variant))
    (tmp_path / "text.py").write_text(TEXT)
    arguments = ["report", str(tmp_path / "both"), "--file", str(tmp_path / "text.py"), "--sample_tokens", "8"]
    assert main([*arguments, "--measure", "false"]) == 0
    assert "report.html" in capsys.readouterr().out
    page = (tmp_path / "both" / "report.html").read_text()
    assert len(page) < 3_000_000
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["data:,"]
    assert "http://" not in page
    assert "https://" not in page
    data = page_data(page)
    first, second = data["runs"]
    assert [first["name"], second["name"]] == ["latte-r-swa++", "transformer++"]
    assert first["valid"] == [[5120, 3.25]]
    assert first["context"] == [[16, 3.5], [32, 3.25], [256, 3.0]]
    assert first["row"]["perplexity"] == pytest.approx(np.exp(3.25), rel=1e-3)  # of the same tokens as the loss
    assert data["train_length"] == 32
    for run in data["runs"]:
        assert run["samples"][0]["prompt"]
        assert TEXT.startswith(run["samples"][0]["prompt"])
        assert run["inspection"]["tokens"][1:] == first["inspection"]["tokens"][1:]
    assert [entry is None for entry in second["latents"]] == [True, True]
    inspection = inspect_text(model("latte-r-swa++"), tokenizer(), TEXT)
    # The report's text has its end mark: one token more behind all others.
    tokens = len(first["inspection"]["tokens"])
    assert tokens in (len(inspection.tokens), len(inspection.tokens) + 1)


def test_use_of_latents_is_what_it_says() -> None:
    layer = inspect_text(model("latte-r-swa++"), tokenizer(), TEXT).layers[0]
    use = latent_use(layer)
    assert layer.slots_THM is not None
    np.testing.assert_allclose(use.use_HM, layer.slots_THM.mean(0), atol=1e-6)
    np.testing.assert_allclose(use.use_HM.sum(-1), 1, atol=1e-5)
    assert use.window_H is not None
    np.testing.assert_allclose(use.window_H, layer.slots_THM[..., 0].mean(0), atol=1e-6)
    p_TM = layer.slots_THM[:, 2].astype(np.float64)
    assert use.entropy_H[2] == pytest.approx(-(p_TM * np.log2(p_TM)).sum(-1).mean(), rel=1e-6)
    assert ((use.effective_H >= 1) & (use.effective_H <= 4)).all()
    assert ((use.reach_HL >= 1 - 1e-9) & (use.reach_HL <= len(p_TM))).all()
    with pytest.raises(ValueError, match="has no latents"):
        latent_use(inspect_text(model("transformer++"), tokenizer(), TEXT).layers[0])


def test_cost_shows_what_grows_and_what_does_not() -> None:
    latte = measure_cost(model("latte-r-swa++"), (64, 16))
    softmax = measure_cost(model("transformer++"), (64, 16))
    assert [cost.length for cost in latte] == [16, 64]
    assert latte[0].memory == latte[1].memory
    assert softmax[1].memory > 2 * softmax[0].memory
    assert all(cost.read > 0 and cost.decode > 0 for cost in latte + softmax)
    # Learned positions end: what is beyond them is left out.
    assert [cost.length for cost in measure_cost(model("latte", max_position_embeddings=32), (64, 16))] == [16]


def test_an_unfinished_run_is_reported_as_such(tmp_path: Path) -> None:
    report = build_report(make_run(tmp_path / "run", finished=False))
    data = page_data(render_report(report))
    assert data["runs"][0]["train"]
    assert "inspection" not in data["runs"][0]
    assert "nothing to look inside" in data["notes"][0]


def test_a_run_that_logged_nothing_yet_is_left_out_with_a_note(tmp_path: Path) -> None:
    make_run(tmp_path / "all" / "done", finished=False)
    for name, files in (("begun", {}), ("silent", {"metrics.jsonl": '{"step": 1}\n'})):
        (tmp_path / "all" / name).mkdir()
        for file, text in {"config.yaml": "out: x\n", **files}.items():
            (tmp_path / "all" / name / file).write_text(text)
    report = build_report(tmp_path / "all", measure=False)
    assert [run.name for run in report.runs] == ["done"]
    assert report.notes[:2] == [f"{name} is left out, it has not logged a loss yet." for name in ("begun", "silent")]


def test_losses_of_a_table_are_of_the_same_tokens_or_of_none(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "all" / name, finished=False) for name in ("a", "b")]
    evaluation(folders[0])
    only_one = page_data(render_report(build_report(tmp_path / "all", measure=False)))
    assert "Losses are of the rows that training validated on." in only_one["table_note"]
    for run in only_one["runs"]:
        assert run["row"]["perplexity"] == pytest.approx(np.exp(run["row"]["valid_loss"]))
        assert run["row"].get("long_loss") is None
    evaluation(folders[1])
    engines = {"a": "kernel", "b": "modules"}
    for folder in folders:
        row = {"decode_engine": engines[folder.name], "decode_tokens_per_second": 9.0, "state_bytes": 9}
        (folder / "compare.json").write_text(json.dumps({"row": {**row, "trained_context": 16}}))
    both = page_data(render_report(build_report(tmp_path / "all", measure=False)))
    assert "Losses at all lengths are of the same 9 held-out tokens." in both["table_note"]
    assert both["scored"] == 9
    assert "a by one native call a token, b by torch" in both["engines"]
    assert "a by one native call a token, b by torch, layer by layer" in both["table_note"]
    for run in both["runs"]:
        row = run["row"]
        assert (row["valid_loss"], row["perplexity"], row["long_loss"]) == (3.5, 33.1, 3.0)


def test_a_sample_beyond_the_training_length_needs_no_reminder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "m")
    loaded = model("latte-r-swa++", max_position_embeddings=8)
    written = _write(loaded, tokenizer(), np.arange(4), 20)
    assert written["text"]
    assert "maximum length" not in capfd.readouterr().err


def test_on_a_phone_tables_show_that_they_scroll_and_one_reading_is_a_dot(tmp_path: Path) -> None:
    reason = missing()
    if reason is not None:
        pytest.skip(f"{reason}: the page is not tested in a browser here")
    for name in ("a", "b"):
        folder = make_run(tmp_path / "all" / name, finished=False)
        evaluation(folder)
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    page = tmp_path / "report.html"
    page.write_text(render_report(build_report(tmp_path / "all", measure=False)), encoding="utf-8")
    with browser() as window:
        window.resize(390, 844)
        window.open(page)
        window.wait("return document.querySelector('.plot svg')")
        assert window.run("return document.querySelectorAll('.plot svg .dot').length") >= 1
        wide = "const t = document.querySelector('.scroll'); return [t.scrollWidth > t.clientWidth, getComputedStyle(t)"
        assert window.run(wide + ".backgroundAttachment]") == [True, "local, local, scroll, scroll"]
        assert window.run("return document.documentElement.scrollWidth <= innerWidth")


def test_runs_without_latents_or_text_still_make_a_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "transformer++")
    (folder / "config.yaml").unlink()
    report = build_report(folder, measure=False)
    assert "give --text or --file" in report.notes[0]
    assert render_report(report).count("<h1>run</h1>") == 1


def test_samples_of_the_run_are_preferred(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "samples.json").write_text(json.dumps([{"prompt": "a </script>", "text": "b {{data}}"}]))
    page = render_report(build_report(folder, text=TEXT, measure=False))
    assert page_data(page)["runs"][0]["samples"] == [{"prompt": "a </script>", "text": "b {{data}}"}]


def test_mistakes_are_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: str) -> str:
        assert main(["report", *arguments]) != 0
        message = capsys.readouterr().err.strip()
        assert "\n" not in message
        return message

    assert "there is no folder" in told(str(tmp_path / "none"))
    assert "neither a run nor a folder of runs" in told(str(tmp_path))
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("out: run\n")
    assert "no metrics yet" in told(str(folder))
    (folder / "metrics.jsonl").write_text("")
    assert "no metrics yet" in told(str(folder))
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (folder / "result.json").write_text("{")
    assert "is not JSON" in told(str(folder))
    (folder / "result.json").unlink()
    (folder / "config.yaml").write_text("out: [")
    assert "is not YAML" in told(str(folder))
    assert "--text or --file" in told(str(folder), "--text", "a", "--file", "b")
    assert "can't be read" in told(str(folder), "--file", str(tmp_path / "nothing"))


def test_a_narrow_last_bin_joins_the_one_before(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", finished=False)
    bins = [(1, 1, 5.0), (2, 9, 4.0), (10, 19, 3.0), (20, 20, 9.0)]
    positions = [{"first": first, "last": last, "tokens": 1 + last - first, "loss": loss} for first, last, loss in bins]
    (folder / "eval.json").write_text(json.dumps({"contexts": [], "positions": positions}))
    found = read_run(folder).positions
    assert len(found) == 3
    assert found[-1][1] == pytest.approx((10 * 3.0 + 9.0) / 11)


def test_runs_of_different_text_are_not_called_the_same(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_run(tmp_path / "all" / name, finished=False)
    assert page_data(render_report(build_report(tmp_path / "all")))["same"]
    recipe = yaml.safe_load((tmp_path / "all" / "b" / "config.yaml").read_text())
    recipe["data"]["source"] = "other.txt"
    (tmp_path / "all" / "b" / "config.yaml").write_text(yaml.safe_dump(recipe))
    assert not page_data(render_report(build_report(tmp_path / "all")))["same"]


def test_folders_are_runs_or_hold_runs(tmp_path: Path) -> None:
    one = make_run(tmp_path / "all" / "b", finished=False)
    two = make_run(tmp_path / "all" / "a", finished=False)
    (tmp_path / "all" / "other").mkdir()
    assert find_runs(one) == [one]
    assert find_runs(tmp_path / "all") == [two, one]
    with pytest.raises(UserError):
        find_runs(tmp_path / "all" / "other")
