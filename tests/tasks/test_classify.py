"""Classification as a task of the trainer: every kind of examples, resuming, comparisons, and bad input."""

import gzip
import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from latte.cli.recipes import recipe_names, recipe_path
from latte.data.cifar import LUMA, cifar
from latte.data.examples import ExampleRows, Examples, ragged
from latte.errors import Stopped, UserError
from latte.recipe import ClassifyRecipe, CompareRecipe, DataRecipe, ModelRecipe, Recipe, TrainRecipe, from_yaml
from latte.report import build_report, render_report
from latte.report.task_comparison import markdown, write
from latte.tasks import open_task
from latte.train import train
from latte.workflows.comparison import compare
from tests.train.support import kill, timeless, weights

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture
def reviews(tmp_path):
    """Texts of two classes, told apart by one word, the classes one after another as in IMDb."""
    path = tmp_path / "reviews.jsonl.gz"
    rows = [
        {"text": f"{'good' if n >= 40 else 'bad'} film {n}" + " and so on" * (n % 5), "label": int(n >= 40)}
        for n in range(80)
    ]
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


@pytest.fixture
def recipe(tmp_path, reviews):
    def make(out="run", variant="latte", data=(), model=(), **changes):
        few = {"num_latents": 4} if "latte" in variant else {}
        settings = {
            "out": str(tmp_path / out),
            "task": "classify",
            "data": DataRecipe(
                **{"source": str(reviews), "cache": str(tmp_path / "cache"), "sequence_length": 32, **dict(data)}
            ),
            "classify": ClassifyRecipe(valid_examples=20),
            "model": ModelRecipe(variant=variant, overrides={**SMALL, **few, **dict(model)}),
            "train": TrainRecipe(steps=8, batch_size=4, warmup_steps=2, save_every=3, eval_every=4, eval_rows=8),
        }
        return Recipe(**{**settings, **changes})

    return make


def test_a_killed_run_resumes_bitwise(recipe, interrupted):
    whole, broken = recipe("whole"), recipe("broken")
    result = train(whole)
    with pytest.raises(RuntimeError, match="pulled the plug"):
        interrupted(broken, 5, kill)
    assert train(broken).valid_accuracy == result.valid_accuracy
    assert weights(broken.out) == weights(whole.out)
    assert timeless(broken.out) == timeless(whole.out)


@pytest.mark.parametrize("kind", ["listops", "pathfinder"])
def test_a_killed_run_resumes_bitwise_with_examples_that_are_generated_again(recipe, interrupted, tmp_path, kind):
    settings = recipe(
        kind,
        classify=ClassifyRecipe(kind=kind, examples=40, valid_examples=4),
        data={"sequence_length": 1024},
        train=TrainRecipe(steps=3, batch_size=2, save_every=1, eval_every=2, eval_rows=2),
    )
    whole, broken = replace(settings, out=str(tmp_path / "whole")), replace(settings, out=str(tmp_path / "broken"))
    train(whole)
    with pytest.raises(RuntimeError, match="pulled the plug"):
        interrupted(broken, 2, kill)
    train(replace(broken, data=replace(broken.data, cache=str(tmp_path / "elsewhere"))))
    assert weights(broken.out) == weights(whole.out)
    assert timeless(broken.out) == timeless(whole.out)


def test_it_learns_a_word(recipe):
    few = TrainRecipe(steps=60, batch_size=16, warmup_steps=5, learning_rate=1e-2, eval_every=0, eval_rows=20)
    assert train(recipe(train=few, model={"initializer_range": 0.1})).valid_accuracy == 1.0


def test_batches_are_padded_to_their_longest_and_cut(recipe):
    rows = ExampleRows(Examples(*ragged([np.arange(3), np.arange(9), np.arange(5)]), np.array([0, 1, 0])), length=7)
    batch = rows.batch([0, 1])
    assert batch["input_ids"].tolist() == [[0, 1, 2, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6]]
    assert batch["attention_mask"].sum(dim=1).tolist() == [3, 7]
    assert batch["labels"].tolist() == [0, 1]
    assert "attention_mask" not in rows.batch([1])


def test_parts_do_not_overlap_and_have_both_classes(recipe):
    task = open_task(recipe())
    parts = [task.rows.examples, task.held_out.examples]
    texts = [{part.tokens(n).tobytes() for n in range(len(part))} for part in parts]
    assert [len(part) for part in parts] == [60, 20]
    assert len(texts[0] | texts[1]) == 80
    assert all(set(np.asarray(part.labels)) == {0, 1} for part in parts)
    assert task.chance == 0.5
    assert bytes(task.held_out.examples.tokens(0).astype(np.uint8)).split()[0] in (b"good", b"bad")


@pytest.mark.parametrize("kind", ["listops", "pathfinder"])
def test_generated_examples_train(recipe, kind):
    settings = recipe(
        kind,
        classify=ClassifyRecipe(kind=kind, examples=40, valid_examples=4),
        data={"sequence_length": 1024},
        train=TrainRecipe(steps=1, batch_size=2, eval_rows=2),
    )
    assert 0 <= train(settings).valid_accuracy <= 1
    task = open_task(settings)
    assert [len(task.rows), len(task.held_out), len(task.test_rows)] == [40, 4, 4]
    assert task.chance == (0.1 if kind == "listops" else 0.5)


def test_pairs_of_the_aan_layout(recipe, tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{n % 2}.0\tP{n}\tQ{n}\tfirst {n}\tsecond text {n}\n" for n in range(30)))
    settings = recipe("pairs", data={"source": str(path)}, classify=ClassifyRecipe(kind="pairs", valid_examples=10))
    train(settings)
    batch = open_task(settings).rows.batch([0, 1])
    assert bytes(batch["pair_input_ids"][0].tolist()).startswith(b"second text")
    path.write_text("1\tonly\tthree\n")
    with pytest.raises(
        UserError, match=r"pairs.tsv, line 1 has 3 columns, expected 5 with tabs between them: label, id1"
    ):
        open_task(settings)


def batches(folder, form, images=3):
    """CIFAR-10 of a few images in one of its forms."""
    chance = np.random.RandomState(0)
    names, written = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"], {}
    for name in names:
        data, labels = chance.randint(0, 256, (images, 3, 1024)).astype(np.uint8), chance.randint(0, 10, images)
        written[name] = data, labels
        if form == "bin":
            (folder / f"{name}.bin").write_bytes(
                b"".join(bytes([label]) + image.tobytes() for image, label in zip(data, labels, strict=True))
            )
        elif form == "pickle":
            whole = {b"data": data.reshape(images, -1), b"labels": labels.tolist()}
            (folder / name).write_bytes(pickle.dumps(whole, protocol=2))
        else:
            from PIL import Image

            Image.fromarray(data.transpose(0, 2, 1)).save(folder / f"{name}.png")
    if form == "png":
        labels = [label for name in names[:5] for label in written[name][1].tolist()]
        (folder / "train_lables.json").write_text(json.dumps(labels))
        (folder / "test_lables.json").write_text(json.dumps(written["test_batch"][1].tolist()))
    return written


@pytest.mark.parametrize("form", ["png", "bin", "pickle"])
def test_cifar_in_all_its_forms(tmp_path, form):
    written = batches(tmp_path, form)
    examples = cifar(str(tmp_path), "train")
    data, labels = written["data_batch_2"]
    assert len(examples) == 15
    assert examples.labels[3:6].tolist() == labels.tolist()
    red, green, blue = data[1].astype(np.float32)
    assert examples.tokens(4).tolist() == (red * LUMA[0] + green * LUMA[1] + blue * LUMA[2]).astype(int).tolist()
    assert len(cifar(str(tmp_path), "test")) == 3


def test_images_of_another_size_and_pickles_with_code_are_refused(tmp_path):
    batches(tmp_path, "bin")
    (tmp_path / "data_batch_3.bin").write_bytes(b"\0" * 3000)
    with pytest.raises(UserError, match=r"data_batch_3.bin has 3,000 bytes, expected a multiple of 3073"):
        cifar(str(tmp_path), "train")
    other = tmp_path / "pickled"
    other.mkdir()
    batches(other, "pickle")
    (other / "data_batch_1").write_bytes(pickle.dumps({b"data": np.zeros((2, 5), np.uint8), b"labels": [0, 1]}, 2))
    with pytest.raises(UserError, match=r"images of shape \(5,\), expected 3072 bytes"):
        cifar(str(other), "train")
    (other / "data_batch_1").write_bytes(pickle.dumps(Path("x")))
    with pytest.raises(UserError, match=r"is not a batch of CIFAR-10: .*it asks for pathlib"):
        cifar(str(other), "train")
    with pytest.raises(UserError, match="there is no CIFAR-10 in"):
        cifar(str(tmp_path / "none"), "train")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"text": "a", "label": 2}], "has the label 2, expected 0 to 1"),
        ([{"text": "a", "label": -1}], "has the label -1, expected 0 to 1"),
        ([{"text": "a", "label": 0}], "has no example of class 1, expected some of each of 2 classes"),
        ([{"text": "a", "score": 0}], "line 1 has 'text', 'score', expected the fields 'text' and 'label'"),
        ([{"text": "a", "label": "good"}], "line 1 has the label 'good', expected a whole number"),
        ([{"text": "", "label": 0}], "line 1: the field 'text' has no text"),
        ([["a", 0]], "line 1 has a list, expected the fields"),
        ([], "has no examples"),
    ],
)
def test_files_that_do_not_fit(recipe, tmp_path, lines, message):
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=message):
        train(recipe("bad", data={"source": str(path)}))
    assert not (tmp_path / "bad").exists()


def test_settings_that_do_not_fit(recipe, tmp_path):
    with pytest.raises(UserError, match=r"classify.classes is 3, expected 10 for listops"):
        ClassifyRecipe(kind="listops", classes=3)
    with pytest.raises(UserError, match=r"classify.size is 64, expected 32 or 128"):
        ClassifyRecipe(size=64)
    with pytest.raises(UserError, match=r"whose mixer 'gla' reads only forwards"):
        train(recipe(variant="gla"))
    with pytest.raises(UserError, match="there is no file"):
        train(recipe(data={"source": str(tmp_path / "none.jsonl")}))
    with pytest.raises(UserError, match="expected a file of texts with labels"):
        train(recipe(data={"source": "python-stdlib"}))
    with pytest.raises(UserError, match=r"classify.valid_examples is 80, expected fewer than the 80 examples"):
        train(recipe(classify=ClassifyRecipe(valid_examples=80)))
    with pytest.raises(UserError, match="a classifier writes no text"):
        train(recipe(train=TrainRecipe(sample_every=2)))


def test_a_comparison_has_chance_majority_and_confusion(recipe, tmp_path):
    one = recipe()
    settings = CompareRecipe(
        out=str(tmp_path / "compare"),
        variants=["latte", "transformer++", "linformer"],
        task="classify",
        data=one.data,
        classify=one.classify,
        model=ModelRecipe(overrides={**SMALL, "num_latents": 4}),
        overrides={"linformer": {"length": 32, "slots": 4}},
        train=one.train,
        isolate=False,
    )
    rows = compare(settings)
    for row in rows:
        confusion = np.array(row.scores[0]["about"]["confusion"])
        assert confusion.sum() == 20
        assert row.accuracy == confusion.trace() / 20
        assert row.majority == confusion.sum(axis=1).max() / 20
        assert len(row.curve) == 2
    table = markdown(rows)
    assert "| chance |" in table
    assert "| the most frequent answer |" in table
    assert {path.name for path in write(rows, Path(settings.out))} == {"results.json", "table.md", "accuracy.png"}
    page = render_report(build_report(settings.out, measure=False))
    assert "confusion" in page
    assert "answers" in page


LRA = [name for name in recipe_names() if name.startswith("lra-")]


def test_there_are_four_tasks_with_the_papers_settings_each():
    tasks = ("listops", "text", "image", "pathfinder")
    assert {*LRA} == {f"lra-{task}{paper}" for task in tasks for paper in ("", "-paper")}


@pytest.fixture
def task_files(tmp_path):
    """Small files in place of IMDb and CIFAR-10."""
    words = [json.dumps({"text": "word " * 900, "label": n % 2}) for n in range(90)]
    (tmp_path / "texts.jsonl").write_text("\n".join(words))
    folder = tmp_path / "cifar"
    folder.mkdir()
    batches(folder, "bin", images=20)
    return {"text": str(tmp_path / "texts.jsonl"), "image": str(folder)}


@pytest.mark.parametrize("name", [name for name in LRA if name.endswith("-paper")])
def test_the_papers_settings_start_and_stop_after_a_few_steps(name, task_files, tmp_path, interrupted):
    settings = from_yaml(Recipe, recipe_path(name))
    kind = settings.classify.kind
    settings = replace(
        settings,
        out=str(tmp_path / "run"),
        data=replace(settings.data, cache=str(tmp_path / "cache"), source=task_files.get(kind, settings.data.source)),
        classify=replace(settings.classify, examples=40, valid_examples=4, test_examples=4, test_source=None),
        train=replace(settings.train, batch_size=2, micro_batch_size=1),
    )

    def stop():
        raise Stopped("enough", 15)

    with pytest.raises(Stopped, match="enough"):
        interrupted(settings, 2, stop)


@pytest.mark.parametrize("name", [name for name in LRA if not name.endswith("-paper")])
def test_every_model_of_a_comparison_takes_a_step(name, task_files, tmp_path):
    settings = from_yaml(CompareRecipe, recipe_path(name))
    kind = settings.classify.kind
    settings = replace(
        settings,
        out=str(tmp_path / "compare"),
        learning_rates=[],
        search_steps=None,
        data=replace(settings.data, cache=str(tmp_path / "cache"), source=task_files.get(kind, settings.data.source)),
        classify=replace(settings.classify, examples=40, valid_examples=4, test_examples=4, test_source=None),
        train=replace(settings.train, steps=1, batch_size=2, eval_rows=2),
        isolate=False,
    )
    rows = compare(settings)
    assert [row.name for row in rows] == ["latte", "latte-r-swa++", "transformer++", "linformer", "s5", "mega-chunk"]
    assert all(torch.tensor(row.valid_loss).isfinite() for row in rows)
