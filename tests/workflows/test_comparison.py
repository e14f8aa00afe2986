"""Comparisons: the same budget for all, sizes matched, nothing done twice, mistakes in one sentence."""

import json
import math
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from latte.cli.main import main
from latte.cli.recipes import recipe_names, recipe_path
from latte.errors import UserError
from latte.loading.layout import read_metrics
from latte.models import LatteForCausalLM, preset
from latte.ops.native.library import available
from latte.recipe import CompareRecipe, DataRecipe, ExtendRecipe, ModelRecipe, Recipe, TrainRecipe, from_yaml, to_yaml
from latte.report.comparison import markdown, write
from latte.workflows import comparison as module
from latte.workflows.comparison import compare
from latte.workflows.sizes import count_parameters, plan

EXTRA = {"vocab_size": 257, "max_position_embeddings": 16}
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture
def recipe(tmp_path):
    chance = random.Random(0)
    lines = [json.dumps({"text": " ".join(chance.choices("abcdef", k=chance.randint(20, 90)))}) for _ in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))

    def make(**settings):
        defaults = {
            "out": str(tmp_path / "compare"),
            "data": DataRecipe(
                source=str(tmp_path / "text.jsonl"),
                cache=str(tmp_path / "cache"),
                tokenizer="bytes",
                sequence_length=16,
                valid_fraction=0.2,
            ),
            "model": ModelRecipe(overrides={**SMALL, "num_latents": 4, "window": 4}),
            "train": TrainRecipe(steps=4, batch_size=2, eval_every=2, eval_rows=4),
            "eval_tokens": 300,
            "decode_context": 40,
            "decode_tokens": 4,
            "timing_rounds": 1,
            "sample_tokens": 5,
            "isolate": False,
        }
        return CompareRecipe(**{**defaults, **settings})

    return make


def test_rows_table_and_plots(recipe, tmp_path, monkeypatch):
    settings = recipe(variants=["latte-r-swa++", "latte", "gla", "transformer++"])
    rows = compare(settings)
    assert [row.name for row in rows] == settings.variants
    assert {row.tokens for row in rows} == {4 * 2 * 16}
    by_name = {row.name: row for row in rows}
    assert [entry["context"] for entry in by_name["latte"].contexts] == [4, 8, 16]  # its positions end there
    assert [entry["context"] for entry in by_name["gla"].contexts] == [4, 8, 16, 32, 64, 128]
    cached = 2 * 2 * 40 * 16 * 4  # layers, keys and values, tokens, width, bytes of a float
    assert cached <= by_name["transformer++"].state_bytes < 1.05 * cached
    paths = write(rows, Path(settings.out))
    assert all(path.stat().st_size > 100 for path in paths)
    table, caption, *rest = markdown(rows).split("\n\n")
    assert rest[0] == "## Where latte-r-swa++ loses"
    assert table.count("\n") == 5
    assert "losses at all lengths are of the same" in caption
    for row in rows:  # loss and perplexity of one table agree
        assert math.log(row.at_training["perplexity"]) == pytest.approx(row.at_training["loss"])
        assert len({entry["tokens"] for entry in row.contexts}) == 1
    assert json.loads(paths[0].read_text())[0]["name"] == "latte-r-swa++"
    for name in settings.variants:
        assert json.loads((Path(settings.out) / name / "samples.json").read_text())[0]["prompt"] == ""
    for what in ("_train", "time_models"):
        monkeypatch.setattr(module, what, lambda *args, what=what, **kwargs: pytest.fail(f"{what} again"))
    assert compare(settings) == rows


def test_parameters_are_matched_by_the_width_of_the_mlp(recipe):
    names = ["latte", "latte-r-swa++", "r-swa++", "transformer++"]
    settings = recipe(variants=names, match_parameters=True, model=ModelRecipe(size="tiny"))
    counts = {
        name: count_parameters(entry.model.variant, entry.model.overrides, "tiny", EXTRA)
        for name, entry in plan(settings, EXTRA).items()
    }
    assert max(counts.values()) / min(counts.values()) < 1.01
    alone = plan(recipe(variants=names, model=ModelRecipe(size="tiny")), EXTRA)
    free = [count_parameters(entry.model.variant, entry.model.overrides, "tiny", EXTRA) for entry in alone.values()]
    assert max(free) / min(free) > 1.2


def test_parameters_without_an_mlp_are_matched_by_layers_and_width(recipe):
    names = ["latte-r-swa++", "mamba", "mamba2", "kla", "rwkv7"]
    settings = recipe(variants=names, match_parameters=True, match="latte-r-swa++", model=ModelRecipe(size="tiny"))
    planned = plan(settings, EXTRA)
    counts = [count_parameters(entry.model.variant, entry.model.overrides, "tiny", EXTRA) for entry in planned.values()]
    assert max(abs(count / counts[0] - 1) for count in counts) <= 0.02
    assert {"intermediate_size"} == set(planned["rwkv7"].model.overrides)
    for name in ("mamba", "mamba2", "kla"):
        assert "num_hidden_layers" in planned[name].model.overrides
        assert "intermediate_size" not in planned[name].model.overrides
    with pytest.raises(UserError, match=r"mamba2: no width of its MLP, .* within 0.0% of .* the nearest has"):
        plan(
            recipe(
                variants=["mamba2"],
                match_parameters=True,
                match="latte-r-swa++",
                match_within=0.0,
                model=ModelRecipe(size="tiny"),
            ),
            EXTRA,
        )


def test_a_narrow_mlp_gives_way_to_fewer_layers(recipe):
    wide = {"intermediate_size": 40, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2}
    settings = recipe(
        variants=["transformer++", "retnet"],
        match_parameters=True,
        match="transformer++",
        model=ModelRecipe(overrides=wide),
    )
    planned = plan(replace(settings, overrides={"transformer++": wide}), EXTRA)
    assert planned["retnet"].model.overrides["num_hidden_layers"] == 1
    assert planned["retnet"].model.overrides["intermediate_size"] >= 64


def test_each_model_has_the_best_of_the_learning_rates(recipe):
    rates = [1e-5, 1e-2]
    settings = recipe(
        variants=["transformer++", "wider"],
        bases={"wider": "transformer++"},
        overrides={"wider": {"intermediate_size": 48}},
        learning_rates=rates,
        search_steps=3,
    )
    said: list[str] = []
    rows = compare(settings, said.append)
    for row in rows:
        assert [rate for rate, _ in row.searched] == rates
        assert row.learning_rate == min(row.searched, key=lambda pair: pair[1])[0]
        assert row.rate_at_edge
        recorded = from_yaml(Recipe, Path(settings.out) / row.name / "config.yaml")
        assert recorded.train.learning_rate == row.learning_rate
    assert rows[0].parameters < rows[1].parameters
    assert sum("learning rate 0.01, 3 steps: validation loss" in line for line in said) == 2
    text = markdown(rows)
    assert "Each learning rate is the best of 1e-05, 0.01 in short runs; ! marks" in text
    assert text.count("**2.") + text.count("**3.") + text.count("**4.") + text.count("**5.") == 2  # the chosen ones
    said.clear()
    assert compare(settings, said.append) == rows
    assert not said


def test_speeds_are_timed_again_where_that_is_asked_for(recipe, monkeypatch):
    settings = recipe(variants=["latte-r-swa++", "transformer++"])
    rows = compare(settings)
    assert {row.decode_engine for row in rows} == {"kernel" if available() else "modules"}
    assert all(row.train_tokens_per_second > 0 and row.module_tokens_per_second > 0 for row in rows)
    monkeypatch.setattr(module, "_train", lambda *args: pytest.fail("trained again"))
    monkeypatch.setattr(module, "load_average", lambda: 77.5)
    again = compare(replace(settings, time_again=True))
    assert [row.load_average for row in again] == [77.5, 77.5]
    assert "the load average when they began was 77.5" in markdown(again)
    assert compare(settings) == again  # the last timing is kept, in the runs as well
    kept = json.loads((Path(settings.out) / "transformer++" / "compare.json").read_text())["row"]
    assert kept["train_tokens_per_second"] == again[1].train_tokens_per_second


def test_counting_makes_no_memory_and_is_right():
    made = LatteForCausalLM(preset("latte-r-swa++", "tiny", vocab_size=99))
    assert count_parameters("latte-r-swa++", {}, "tiny", {"vocab_size": 99}) == sum(
        p.numel() for p in made.parameters()
    )


def test_each_in_a_process_of_its_own(recipe):
    (row,) = compare(recipe(variants=["latte-conv++"], isolate=True))
    assert row.peak_memory_bytes > 50 * 2**20


def test_models_at_once_give_the_rows_of_one_after_another(recipe, tmp_path, monkeypatch):
    settings = recipe(
        variants=["latte-conv++", "mine", "transformer++"],
        bases={"mine": "transformer++"},
        overrides={"mine": {"intermediate_size": 48}},
        learning_rates=[1e-3, 1e-2],
        search_steps=2,
    )
    (first,) = compare(replace(settings, only=["mine"]))
    said: list[str] = []
    rows = compare(replace(settings, jobs=2), said.append)
    assert [row.name for row in rows] == settings.variants
    assert rows[1].valid_loss == first.valid_loss
    assert said[0] == f"2 models, 2 at once; what they show goes to {settings.out}/NAME.log"
    assert sum("learning rate 0.001, 2 steps: validation loss" in line for line in said) == 2
    assert (Path(settings.out) / "latte-conv++.log").is_file()
    apart = compare(replace(settings, out=str(tmp_path / "apart")))
    threads = pytest.approx if torch.get_num_threads() > 1 else lambda value: value
    assert [row.valid_loss for row in apart] == [threads(row.valid_loss) for row in rows]
    monkeypatch.setattr(module, "run_jobs", lambda *args: pytest.fail("started again"))
    assert compare(replace(settings, jobs=2)) == rows


def test_a_signal_stops_all_models_and_keeps_what_is_saved(recipe, tmp_path):
    long = TrainRecipe(steps=10**6, batch_size=2, eval_every=0, eval_rows=2, save_every=0, log_every=1)
    settings = recipe(variants=["transformer++", "latte-conv++"], train=long, jobs=2, isolate=True)
    (tmp_path / "recipe.yaml").write_text(to_yaml(settings))
    command = [sys.executable, "-m", "latte.cli.main", "compare", "--config", str(tmp_path / "recipe.yaml")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    folders = [Path(settings.out) / name for name in settings.variants]
    while process.poll() is None and not all(read_metrics(folder) for folder in folders):
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, shown = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, shown
    assert "latte compare: stopped and saved: the same command goes on" in shown
    for folder in folders:
        assert len(list((folder / "checkpoints").glob("step-*"))) == 1
        assert "saved: the same command goes on" in folder.with_name(f"{folder.name}.log").read_text()


def test_sizes_are_matched_with_all_variants_where_some_are_compared(recipe):
    names = ["latte", "latte-r-swa++"]
    settings = recipe(variants=names, match_parameters=True, model=ModelRecipe(size="tiny"))
    _, whole = module.open_comparison(settings, print)
    _, some = module.open_comparison(replace(settings, only=["latte"]), print)
    assert list(some) == ["latte"]
    assert some["latte"] == whole["latte"]


def test_some_of_a_recipe_are_compared_by_their_names(capsys):
    command = ["compare", "--config", "table2-small", "--print_config"]
    with pytest.raises(SystemExit):
        main([*command, "--only", "gla,mamba"])
    assert "only:\n- gla\n- mamba\n" in capsys.readouterr().out
    assert main([*command, "--only", "glaa"]) == 2
    assert "only has 'glaa', expected some of variants: latte-r-swa++" in capsys.readouterr().err
    assert main([*command, "--variants", "gla,mamba"]) == 2
    assert "(--only compares some of a recipe's variants)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"jobs": 0}, "jobs is 0, expected at least 1"),
        ({"only": ["gla"]}, "only has 'gla', expected some of variants"),
        ({"variants": ["lattte"]}, "no variant 'lattte'"),
        ({"variants": ["latte", "latte"]}, "expected different names"),
        ({"overrides": {"gla": {}}}, "'gla' is set but not compared"),
        ({"match": "glaa", "match_parameters": True}, "no variant 'glaa'"),
        ({"bases": {"mine": "gla"}}, "'mine' is set but not compared"),
        ({"variants": ["mine"], "bases": {"mine": "mine"}}, "no variant 'mine'"),
        ({"variants": ["a/b"]}, "'a/b' is among variants, expected names that a folder can have"),
        ({"learning_rates": [1e-3]}, r"learning_rates are \[0.001\], expected none or several positive"),
        ({"learning_rates": [1e-2, 1e-3]}, "in rising order"),
        ({"learning_rates": [0.0, 1e-3]}, "several positive numbers"),
        ({"search_steps": 0}, "search_steps is 0, expected at least 1"),
        ({"timing_rounds": 0}, "timing_rounds is 0, expected at least 1"),
        ({"match_within": 2.0}, "match_within is 2.0, expected 0 to 1"),
    ],
)
def test_mistakes(recipe, settings, message):
    with pytest.raises(UserError, match=message):
        compare(recipe(**settings))


def test_packaged_recipes_are_valid(capsys):
    kinds = {"compare": CompareRecipe, "extend": ExtendRecipe, "train": Recipe}
    for name in recipe_names():
        command = "compare" if "variants" in recipe_path(name).read_text() else "train"
        command = "extend" if name.startswith("extend") else command
        assert from_yaml(kinds[command], recipe_path(name))
        with pytest.raises(SystemExit) as caught:
            main([command, "--config", name, "--print_config"])
        assert caught.value.code == 0
        assert "data:" in capsys.readouterr().out
    assert {"demo", "table1-small", "table2-small"} <= set(recipe_names())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"eval_contexts": [0]}, r"eval_contexts is \[0\], expected at least 1"),
        ({"eval_tokens": 1}, "eval_tokens is 1, expected at least 2"),
        ({"decode_context": 0}, "decode_context is 0, expected at least 2"),
        ({"sample_tokens": -1}, "sample_tokens is -1, expected at least 0"),
        ({"min_document_tokens": 10**6}, "min_document_tokens is 1000000, but the longest validation document has"),
        ({"model": ModelRecipe(pretrained="somewhere")}, "a comparison trains new models"),
    ],
)
def test_what_can_not_be_measured_is_refused_before_training(recipe, settings, sentence):
    with pytest.raises(UserError, match=sentence):
        compare(recipe(**settings))
    assert not Path(recipe().out).exists()


def test_runs_of_another_length_are_not_compared(recipe):
    compare(recipe(variants=["transformer++"]))
    longer = TrainRecipe(steps=6, batch_size=2, eval_every=2, eval_rows=4)
    with pytest.raises(UserError, match=r"was trained for 4 steps, now 6: give another --out, so that all"):
        compare(recipe(variants=["latte-r++", "transformer++"], train=longer))
    assert not (Path(recipe().out) / "latte-r++").exists()
