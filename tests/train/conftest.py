"""A corpus and a recipe small enough to train in a second."""

import json

import pytest

from latte.recipe import DataRecipe, ModelRecipe, Recipe, TrainRecipe
from latte.train import run, train
from tests.train.support import StopAt


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    texts = [f"Document {n}: " + f"words and the number {n * 7919 % 1000}\n" * (n % 17) for n in range(150)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def make_recipe(corpus):
    def make(out, variant="latte-conv-swa++", overrides=(), data=(), **train):
        small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        small |= {"num_latents": 4, "window": 4} if "latte" in variant and "swa" in variant else {}
        settings = {"steps": 12, "batch_size": 4, "save_every": 4, "eval_every": 6, "eval_rows": 8, "log_every": 5}
        text = {"source": str(corpus), "cache": str(corpus.parent / "cache"), "tokenizer": "bytes"}
        return Recipe(
            out=str(out),
            data=DataRecipe(**{**text, "sequence_length": 24, **dict(data)}),
            model=ModelRecipe(variant=variant, overrides={**small, **dict(overrides)}),
            train=TrainRecipe(**{**settings, "warmup_steps": 3, **train}),
        )

    return make


@pytest.fixture
def recipe(make_recipe, tmp_path):
    return lambda out="run", *args, **settings: make_recipe(tmp_path / out, *args, **settings)


@pytest.fixture
def interrupted(monkeypatch):
    """Runs a recipe with something happening after a step."""

    def go(recipe, step, action):
        with monkeypatch.context() as patch:
            original = run.LatteTrainer.__init__

            def init(self, *args, callbacks=None, **kwargs):
                original(self, *args, callbacks=[*(callbacks or []), StopAt(step, action)], **kwargs)

            patch.setattr(run.LatteTrainer, "__init__", init)
            return train(recipe)

    return go


@pytest.fixture(scope="module")
def whole(make_recipe, tmp_path_factory):
    """The default recipe, uninterrupted."""
    settings = make_recipe(tmp_path_factory.mktemp("whole") / "run")
    train(settings)
    return settings
