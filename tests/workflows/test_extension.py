"""``latte extend`` as a user runs it, on a small real model and a small text: results, restarts and mistakes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import chdir
from pathlib import Path

import pytest
import safetensors.torch
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from latte.cli.main import main
from latte.data.tokenizer import train_bpe
from latte.errors import UserError
from latte.recipe import ExtendRecipe
from latte.workflows.extension import open_inputs
from tests.extend.families import small_model

TEXT = " ".join(
    f"the {a} {b} saw a {c} by the {d}."
    for a in ["red", "old", "sad"]
    for b in ["fox", "hen", "cow"]
    for c in ["dog", "cat", "owl"]
    for d in ["well", "barn", "gate"]
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A pretrained model and a corpus in an otherwise empty folder."""
    tokenizer = train_bpe([TEXT], 300)
    model = small_model("llama")
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(tmp_path / "pretrained")
    tokenizer.save_pretrained(tmp_path / "pretrained")
    (tmp_path / "train.txt").write_text("@@".join([TEXT] * 3))
    (tmp_path / "valid.txt").write_text(TEXT[:3000])
    (tmp_path / "empty.txt").write_text("")
    return tmp_path


def arguments(folder: Path, out: str = "out", **more: object) -> list[str]:
    settings = {
        "out": folder / out,
        "window": 8,
        "sinks": 2,
        "latents": 4,
        "data.source": folder / "train.txt",
        "data.separator": "@@",
        "data.valid_source": folder / "valid.txt",
        "data.cache": folder / "cache",
        "transfer.steps": 6,
        "transfer.sequence_length": 48,
        "transfer.save_every": 2,
        "distil.steps": 6,
        "distil.sequence_length": 48,
        "distil.save_every": 2,
        "lengthen.steps": 2,
        "lengthen.sequence_length": 96,
        "judge.contexts": "[32,64]",
        "judge.long_contexts": "[64,128]",
        "judge.max_tokens": 400,
        "judge.retrieval_contexts": "[96]",
        "judge.retrieval_trials": 1,
        "judge.retrieval_tasks": "[fact]",
        "judge.decode_contexts": "[32]",
        "judge.decode_tokens": 2,
        **more,
    }
    return [str(folder / "pretrained"), *(f"--{name}={value}" for name, value in settings.items())]


def extend(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(arguments), capture_output=True, text=True, env=environment(), check=False)


def command(arguments: list[str]) -> list[str]:
    return [sys.executable, "-m", "latte.cli.main", "extend", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def test_extends_and_the_folder_works(folder: Path) -> None:
    done = extend(arguments(folder, **{"distil.lora_rank": 2, "distil.next_token": 0.1}))
    assert done.returncode == 0, done.stderr
    out = folder / "out"
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    written = model.generate(**tokenizer("the red fox", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert written.shape[1] > 3
    assert not any("lora" in name for name in weights(out))
    assert not list(out.glob("*.bin"))
    assert "import latte" in (out / "README.md").read_text()
    assert "Latte extension" in (out / "report.html").read_text()
    assert {path.stem for path in out.glob("*.png")} == {"perplexity", "positions", "layers", "progress", "decoding"}
    results = json.loads((out / "results.json").read_text())
    found = results["perplexity"]["validation"]
    assert set(found) == {"original", "window", "window and sinks", "extended", "gap closed"}
    assert set(found["extended"]) == {"32", "64"}
    assert set(found["gap closed"]) == {"32", "64"}
    assert results["check"]["as_original"] < 1e-4
    assert results["check"]["decoding"] < 1e-4
    ends = {stage: lines[-1]["tokens"] for stage, lines in results["progress"].items()}
    assert ends == {"transfer": 6 * 48, "distil": 12 * 48, "lengthen": 12 * 48 + 2 * 96}
    assert all("valid_next_token" in line for line in results["progress"]["transfer"])
    before, after = (results["layers"]["transfer"][name] for name in ("layers_before", "layers"))
    assert len(before) == len(after) == 3
    assert results["decoding"]["extended"]["32"]["seconds_per_token"] > 0
    assert set(results["retrieval"]["extended"]["96"]) == {"0.1", "0.3", "0.5", "0.7", "0.9"}
    with chdir(folder):  # the folder is taken like a run's, from any other folder
        assert main(["eval", "out", "--contexts", "32", "--json"]) == 0
        assert main(["inspect", "out", "--text", "the red fox saw", "--out", "look.html"]) == 0
        assert main(["report", "out"]) == 0
        assert "Latte extension" in (out / "report.html").read_text()
    again = extend(arguments(folder, **{"distil.lora_rank": 2, "distil.next_token": 0.1}))
    assert again.returncode == 0
    assert "nothing to do" in " ".join(again.stderr.split())  # the console breaks lines where they are long


def test_a_killed_run_ends_with_the_same_weights(folder: Path) -> None:
    assert extend(arguments(folder, "whole")).returncode == 0
    for moment in (0.0, 0.4, 0.8):  # into training, which begins when the first stage's folder appears
        process = subprocess.Popen(command(arguments(folder)), stderr=subprocess.DEVNULL, env=environment())
        deadline = time.monotonic() + 120
        stage = ("transfer", "distil", "lengthen")[int(moment * 3)]
        while not (folder / "out-run" / stage / "checkpoints").exists() and time.monotonic() < deadline:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
        time.sleep(moment / 10)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (folder / "out").exists()
    assert extend(arguments(folder)).returncode == 0
    whole, resumed = weights(folder / "whole"), weights(folder / "out")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_what_is_measured_may_change_after_training(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["extend", *arguments(folder)]) == 0
    before = weights(folder / "out")
    measured = json.loads((folder / "out-run" / "judge.json").read_text())
    (folder / "more.txt").write_text(TEXT[:2000])
    changes = {"judge.contexts": "[16, 64]", "judge.sources": f"[{folder / 'more.txt'}]", "judge.decode_tokens": 3}
    capfd.readouterr()
    assert main(["extend", *arguments(folder, **changes)]) == 0
    said = " ".join(capfd.readouterr().err.split())
    assert "measuring perplexity of extended on validation at 16" in said
    assert "measuring perplexity of extended on more at 64" in said
    assert "measuring decoding of extended at 32" in said
    assert "measuring perplexity of extended on validation at 64" not in said  # the same tokens: measured before
    assert "step " not in said.replace("steps", "")  # nothing was trained again
    after = weights(folder / "out")
    assert all(torch.equal(before[name], after[name]) for name in before)
    found = json.loads((folder / "out" / "results.json").read_text())["perplexity"]
    assert set(found["validation"]["extended"]) >= {"16", "64"}
    same = measured["perplexity of extended on validation at 64"]["contexts"][0]
    assert found["validation"]["extended"]["64"] == same
    assert set(found["more"]["extended"]) == {"16", "64"}


def test_plan_shows_what_it_would_take_and_writes_nothing(folder: Path) -> None:
    planned = extend([*arguments(folder), "--dry-run"])
    assert planned.returncode == 0, planned.stderr
    assert "of them new" in planned.stdout
    assert "GiB" in planned.stdout
    assert "transfer" in planned.stdout
    assert not (folder / "out").exists()
    assert not (folder / "out-run").exists()


LONG_ROWS = {f"{stage}.sequence_length": 1100 for stage in ("transfer", "distil", "lengthen")}
WIDE = {"window": 1000, "data.valid_source": "train.txt", **LONG_ROWS}
MISTAKES = {
    "no model": ({}, "nowhere"),
    "empty corpus": ({"data.source": "empty.txt"}, "empty"),
    "no corpus": ({"data.source": "missing.txt"}, "missing.txt"),
    "short corpus": ({"transfer.sequence_length": 100000}, "fewer than one row"),
    "bad window": ({"window": -1}, "window is -1, expected at least 0"),
    "short stage": (
        {"window": 60},
        "transfer.sequence_length is 48, expected more than 63",
    ),
    "short text": (WIDE, "the longest document of the training part has"),
    "setting": ({"windw": 3}, "unknown setting windw"),
    "judge context": ({"judge.contexts": "[0]"}, "judge.contexts has 0, expected lengths of at least 1"),
    "judge source": ({"judge.sources": "[nowhere.md]"}, "there is no file or folder nowhere.md"),
    "judge retrieval": ({"judge.retrieval_contexts": "[9]"}, "judge.retrieval_contexts has 9, expected more than"),
    "no teacher": ({"distil.lora_rank": 2, "lengthen.divergence": 0.5}, "the model no longer holds its teacher"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_one_sentence_and_leave_nothing(
    folder: Path, mistake: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings, sentence = MISTAKES[mistake]
    settings = {name: folder / value if str(value).endswith(".txt") else value for name, value in settings.items()}
    given = arguments(folder, **settings)
    if mistake == "no model":
        given[0] = str(folder / "nowhere")
    assert main(["extend", *given]) != 0
    said = capfd.readouterr().err
    assert sentence in said, said
    assert not (folder / "out").exists()
    assert not (folder / "out-run").exists()  # it would block the corrected command


def test_a_model_of_half_precision_is_saved_so_and_the_default_text_is_named(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "pretrained", dtype=torch.bfloat16)
    model.save_pretrained(folder / "pretrained")
    short = {"distil.steps": 0, "lengthen.steps": 0, "transfer.steps": 1, "transfer.sequence_length": 48}
    judged = {"judge.contexts": "[32]", "judge.long_contexts": "[]", "judge.retrieval_contexts": "[]"}
    done = extend(arguments(folder, **short, **judged, **{"judge.decode_contexts": "[]"}))
    assert done.returncode == 0, done.stderr
    assert {value.dtype for value in weights(folder / "out").values()} == {torch.bfloat16}
    assert json.loads((folder / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert "they were taught on train.txt" in (folder / "out" / "README.md").read_text()
    said = io.StringIO()
    with pytest.raises(UserError, match="nowhere"):
        open_inputs(ExtendRecipe(model=str(folder / "nowhere")), Console(file=said))
    assert "teaching on Python's own sources" in said.getvalue()


def test_a_folder_in_use_is_left_alone(folder: Path) -> None:
    (folder / "out").mkdir()
    (folder / "out" / "mine.txt").write_text("precious")
    done = extend(arguments(folder))
    assert done.returncode == 1
    assert "give another --out" in done.stderr
    assert [path.name for path in (folder / "out").iterdir()] == ["mine.txt"]
