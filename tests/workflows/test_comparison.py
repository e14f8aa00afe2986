"""Comparisons: the same budget for all, sizes matched, nothing done twice, mistakes in one sentence."""

import json
import math
import random
from pathlib import Path

import pytest

from latte.cli.main import main
from latte.cli.recipes import recipe_names, recipe_path
from latte.errors import UserError
from latte.eval.comparison import decode_speed
from latte.models import LatteForCausalLM, preset
from latte.recipe import CompareRecipe, DataRecipe, ExtendRecipe, ModelRecipe, Recipe, TrainRecipe, from_yaml
from latte.report.comparison import markdown, write
from latte.workflows import comparison as module
from latte.workflows.comparison import compare, count_parameters, plan

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
    table, caption = markdown(rows).split("\n\n")
    assert table.count("\n") == 5
    assert "losses at all lengths are of the same" in caption
    for row in rows:  # loss and perplexity of one table agree
        assert math.log(row.at_training["perplexity"]) == pytest.approx(row.at_training["loss"])
        assert len({entry["tokens"] for entry in row.contexts}) == 1
    assert json.loads(paths[0].read_text())[0]["name"] == "latte-r-swa++"
    for name in settings.variants:
        assert json.loads((Path(settings.out) / name / "samples.json").read_text())[0]["prompt"] == ""
    monkeypatch.setattr(module, "_train", lambda *args: pytest.fail("trained again"))
    assert compare(settings) == rows


def test_parameters_are_matched_by_the_width_of_the_mlp(recipe):
    names = ["latte", "latte-r-swa++", "r-swa++", "transformer++"]
    settings = recipe(variants=names, match_parameters=True, model=ModelRecipe(size="tiny"))
    extra = {"vocab_size": 257, "max_position_embeddings": 16}
    counts = {
        name: count_parameters(entry.model.variant, entry.model.overrides, "tiny", extra)
        for name, entry in plan(settings, 257).items()
    }
    assert max(counts.values()) / min(counts.values()) < 1.01
    alone = plan(recipe(variants=names, model=ModelRecipe(size="tiny")), 257)
    free = [count_parameters(entry.model.variant, entry.model.overrides, "tiny", extra) for entry in alone.values()]
    assert max(free) / min(free) > 1.2


def test_counting_makes_no_memory_and_is_right():
    made = LatteForCausalLM(preset("latte-r-swa++", "tiny", vocab_size=99))
    assert count_parameters("latte-r-swa++", {}, "tiny", {"vocab_size": 99}) == sum(
        p.numel() for p in made.parameters()
    )
    speed, held, engine = decode_speed(made.eval(), 40, 4)
    assert engine in ("kernel", "modules")
    assert speed > 0
    assert held == decode_speed(made, 80, 4)[1]


def test_each_in_a_process_of_its_own(recipe):
    (row,) = compare(recipe(variants=["latte-conv++"], isolate=True))
    assert row.peak_memory_bytes > 50 * 2**20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"variants": ["lattte"]}, "no variant 'lattte'"),
        ({"variants": ["latte", "latte"]}, "expected different names"),
        ({"overrides": {"gla": {}}}, "'gla' is set but not compared"),
        ({"match": "gla"}, "'gla' is set but not compared"),
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
    assert {"demo", "table1-small"} <= set(recipe_names())


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
