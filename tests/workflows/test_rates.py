"""The choice of learning rates: each is tried once, the lowest loss wins, and a loss that is not finite loses."""

import json
import math
from dataclasses import replace

import pytest

from latte.errors import NotFinite, UserError
from latte.recipe import DataRecipe, ModelRecipe, Recipe, TrainRecipe
from latte.train import Result
from latte.workflows import rates as module
from latte.workflows.rates import choose_rate, short_run

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
RATES = [1e-4, 1e-2, 1e4]


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "text.txt").write_text("abcdefgh " * 400)
    return Recipe(
        out=str(tmp_path / "run"),
        data=DataRecipe(
            source=str(tmp_path / "text.txt"), cache=str(tmp_path / "cache"), tokenizer="bytes", sequence_length=16
        ),
        model=ModelRecipe(variant="transformer++", overrides=SMALL),
        train=TrainRecipe(steps=40, batch_size=2, warmup_steps=8, eval_rows=2, clip_norm=0, weight_decay=0),
    )


def test_best_rate_of_short_runs(settings, tmp_path, monkeypatch):
    said: list[str] = []
    search = choose_rate("it", settings, RATES, 10, tmp_path / "search", "digest", said.append)
    assert search.rates == RATES
    assert search.best == 1e-2
    assert search.losses[0] > search.losses[1]
    assert search.losses[2] is None or search.losses[2] > search.losses[1]
    assert [line.split(",")[0] for line in said] == [
        f"it: learning rate {rate}" for rate in ("0.0001", "0.01", "10000")
    ]
    assert sorted(path.name for path in (tmp_path / "search").iterdir()) == ["it", "it.json"]
    assert not list((tmp_path / "search" / "it").iterdir())  # finished runs leave their losses alone

    # Nothing is tried twice; a new rate is tried alone; other settings or another text are tried again.
    tried: list[float] = []

    def fake(run, console):
        tried.append(run.train.learning_rate)
        return Result(10, 1, 1, 1.0 + run.train.learning_rate, 1.0, 1.0, 1)

    monkeypatch.setattr(module, "train", fake)
    again = choose_rate("it", settings, RATES, 10, tmp_path / "search", "digest", said.append)
    assert (again, tried) == (search, [])
    moved = replace(settings, out="elsewhere", data=replace(settings.data, cache="elsewhere"))
    more = choose_rate("it", moved, [1e-3, *RATES[1:]], 10, tmp_path / "search", "digest", said.append)
    assert (tried, more.best) == ([1e-3], 1e-2 if search.losses[1] < 1.001 else 1e-3)
    for other, digest in (
        (replace(settings, model=replace(settings.model, size="small")), "digest"),
        (settings, "new"),
    ):
        tried.clear()
        choose_rate("it", other, RATES, 10, tmp_path / "search", digest, said.append)
        assert tried == RATES


def test_what_is_not_finite_is_never_chosen(settings, tmp_path, monkeypatch):
    losses = {1e-4: math.nan, 1e-2: 3.0, 1e4: NotFinite("the loss is not finite")}

    def fake(run, console):
        loss = losses[run.train.learning_rate]
        if isinstance(loss, Exception):
            raise loss
        return Result(10, 1, 1, loss, 1.0, 1.0, 1)

    monkeypatch.setattr(module, "train", fake)
    search = choose_rate("it", settings, RATES, 10, tmp_path / "search", "digest", lambda line: None)
    assert (search.losses, search.best) == ([None, 3.0, None], 1e-2)
    assert json.loads((tmp_path / "search" / "it.json").read_text())["losses"]["10000"] is None
    losses[1e-2] = math.inf
    with pytest.raises(UserError, match=r"other: the loss was not finite with any of the learning rates 0.0001, 0.01,"):
        choose_rate("other", settings, RATES, 10, tmp_path / "search", "digest", lambda line: None)


def test_training_says_that_a_loss_is_not_finite(settings):
    from latte.train import train

    with pytest.raises(NotFinite, match="not finite at step"):
        train(replace(settings, train=replace(settings.train, learning_rate=1e30, warmup_steps=0)))


def test_a_short_run_has_a_whole_schedule(settings):
    short = short_run(settings.train, 10)
    assert (short.steps, short.warmup_steps, short.eval_every, short.save_every) == (10, 2, 0, 0)
