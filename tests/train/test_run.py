"""A run: its folder, its numbers, and what happens when it is interrupted, damaged or given something else."""

import errno
import fcntl
import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import latte.files
from latte.errors import Stopped, UserError
from latte.files import verify_folder
from latte.layers.feeds import RGLRU
from latte.layers.marks import Mark, Marked, decays, marks_of
from latte.loading.layout import read_metrics
from latte.recipe import Recipe, TrainRecipe, from_yaml
from latte.tasks import language
from latte.train import checkpoint, run, train
from latte.train.trainer import learning_rate_factor, split_by_learning_rate
from tests.train.support import kill, timeless, weights


def test_a_run_learns_and_leaves_what_it_says(recipe):
    settings = recipe(steps=60, learning_rate=1e-2, save_every=25, eval_every=20)
    result = train(settings)
    out = Path(settings.out)
    lines = read_metrics(out)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] - 1
    assert result.valid_loss == lines[-1]["valid_loss"]
    assert [line["step"] for line in lines if "valid_loss" in line] == [20, 40, 60]
    assert [line["step"] for line in lines if "loss" in line] == list(range(5, 61, 5))
    assert checkpoint.all_steps(out) == [50, 60]
    assert list((out / "tensorboard").iterdir())
    assert from_yaml(Recipe, out / "config.yaml") == settings
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
    assert len(tokenizer) == model.config.vocab_size
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert result.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert model.config.use_cache  # the trainer's own setting is not saved
    assert model.eval()(torch.tensor([[1, 2]])).past_key_values is not None
    assert json.loads((checkpoint.path_of(out, 60) / "config.json").read_text())["use_cache"]
    verify_folder(out / "model")
    assert train(settings) == result  # finished: nothing happens again
    assert read_metrics(out) == lines


@pytest.mark.parametrize(
    ("variant", "settings"),
    [
        ("latte-r-swa++", {}),
        ("latte", {"micro_batch_size": 2, "log_every": 3, "overrides": {"dropout": 0.1, "num_latents": 4}}),
        ("transformer++", {"gradient_checkpointing": True, "decay": "linear"}),
    ],
)
def test_interrupted_anywhere_and_resumed_is_bitwise_the_same(recipe, interrupted, variant, settings):
    whole = recipe("whole", variant, **settings)
    train(whole)
    broken = recipe("broken", variant, **settings)
    for step in (2, 4, 7, 8, 11):
        with pytest.raises(RuntimeError, match="plug"):
            interrupted(broken, step, kill)
    train(broken)
    assert weights(broken.out) == weights(whole.out)
    assert timeless(broken.out) == timeless(whole.out)


def test_another_seed_is_another_model(recipe):
    for seed in (0, 1):
        train(recipe(f"seed{seed}", seed=seed, steps=2))
    assert weights(recipe("seed0").out) != weights(recipe("seed1").out)


def test_accumulation_is_the_same_step(recipe):
    for name, micro in (("one", None), ("four", 1)):
        train(recipe(name, micro_batch_size=micro, save_every=0))
    one, four = (read_metrics(Path(recipe(name).out)) for name in ("one", "four"))
    for a, b in zip(one, four, strict=True):
        assert a.get("loss", a.get("valid_loss")) == pytest.approx(b.get("loss", b.get("valid_loss")), rel=1e-5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_within_one_step(recipe, interrupted, number, whole):
    stopped = recipe("stopped")
    with pytest.raises(Stopped, match="stopped at step 6 of 12") as caught:
        interrupted(stopped, 5, lambda: os.kill(os.getpid(), number))
    assert caught.value.signal_number == number
    assert checkpoint.all_steps(Path(stopped.out))[-1] == 6
    train(stopped)
    assert weights(stopped.out) == weights(whole.out)


def test_a_signal_breaks_off_a_validation_and_the_next_run_does_it(recipe, whole, monkeypatch):
    stopped = recipe("stopped")
    original = language.validation_loss

    def validation_loss(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(language, "validation_loss", validation_loss)
        with pytest.raises(Stopped, match="stopped at step 6 of 12"):
            train(stopped)
    assert not any("valid_loss" in line for line in read_metrics(Path(stopped.out)))
    train(stopped)
    assert weights(stopped.out) == weights(whole.out)
    assert timeless(stopped.out) == timeless(whole.out)


def test_killed_between_the_last_checkpoint_and_the_final_model(recipe):
    settings = recipe()
    train(settings)
    before = weights(settings.out)
    shutil.rmtree(Path(settings.out) / "model")
    train(settings)
    assert weights(settings.out) == before


def test_a_loss_that_is_not_finite_stops_before_the_step_and_leaves_the_batch(recipe, monkeypatch, whole):
    settings = recipe(save_every=1)
    original = run.LatteTrainer.compute_loss

    def compute_loss(self, model, inputs, *args, **kwargs):
        loss = original(self, model, inputs, *args, **kwargs)
        return loss * float("nan") if self.state.global_step == 5 else loss

    with monkeypatch.context() as patch:
        patch.setattr(run.LatteTrainer, "compute_loss", compute_loss)
        with pytest.raises(
            UserError, match=r"not finite at step 6 .*stopped before the optimiser step; the batch is in"
        ):
            train(settings)
    (left,) = Path(settings.out).glob("not-finite-step-000006-rank-0.safetensors")
    batch = safetensors.torch.load_file(left)
    assert batch["0.input_ids"].shape == (4, 24)
    assert not batch["losses"].isfinite().all()
    state = safetensors.torch.load_file(checkpoint.path_of(Path(settings.out), 5) / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in state.values())
    train(settings)  # with the cause gone, the same command goes on
    assert weights(settings.out) == weights(whole.out)


def test_a_full_disk_loses_nothing_that_was_saved(recipe, monkeypatch, whole):
    settings = recipe()
    seal = latte.files._seal

    def full(folder, about):
        if about.get("step") == 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        seal(folder, about)

    with monkeypatch.context() as patch:
        patch.setattr(latte.files, "_seal", full)
        with pytest.raises(
            UserError, match=r"step 8 could not be written \(No space left on device\): .*step 4 stands"
        ):
            train(settings)
    assert checkpoint.all_steps(Path(settings.out)) == [4]
    verify_folder(checkpoint.path_of(Path(settings.out), 4))
    assert not list(Path(settings.out).rglob(".part-*"))
    train(settings)
    assert weights(settings.out) == weights(whole.out)


def test_a_real_limit_on_file_size_is_one_sentence(recipe):
    """The kernel refuses the write itself, wherever in the libraries it happens."""
    train(recipe("warm", steps=1))  # the token files are made without the limit
    settings = recipe(steps=3, save_every=2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (15000, before[1]))
    try:
        with pytest.raises(UserError, match=r"step 2 could not be written \(.*there is no earlier one"):
            train(settings)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoint.all_steps(Path(settings.out)) == []
    assert not list(Path(settings.out).rglob(".part-*"))
    train(settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.5}, "train.learning_rate was 0.001, now 0.5"),
        ({"variant": "transformer++"}, "model.variant was 'latte-conv-swa\\+\\+', now 'transformer\\+\\+'"),
        ({"data": {"sequence_length": 12}}, "data.sequence_length was 24, now 12"),
    ],
)
def test_a_folder_of_another_recipe_is_refused(recipe, changes, message):
    train(recipe(steps=2))
    before = sorted(Path(recipe().out).rglob("*"))
    with pytest.raises(UserError, match=message):
        train(recipe(**{"steps": 2, **changes}))
    assert sorted(Path(recipe().out).rglob("*")) == before


def test_what_does_not_change_the_result_may_change(recipe, interrupted, whole):
    settings = recipe()
    with pytest.raises(RuntimeError):
        interrupted(settings, 6, kill)
    train(recipe(log_every=1, save_every=5, keep_checkpoints=3, eval_every=0))
    assert weights(settings.out) == weights(whole.out)


def test_changed_text_is_refused(recipe, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("abc " * 400)
    settings = recipe(steps=1, data={"source": str(text), "split": "tail", "valid_fraction": 0.2})
    train(settings)
    text.write_text("abd " * 400)
    with pytest.raises(UserError, match="the text has changed since"):
        train(settings)


def test_a_checkpoint_of_another_architecture_is_refused(recipe, interrupted):
    settings, other = recipe("a"), recipe("b", overrides={"intermediate_size": 48})
    for each in (settings, other):
        with pytest.raises(RuntimeError):
            interrupted(each, 5, kill)
    shutil.rmtree(checkpoint.path_of(Path(settings.out), 4))
    shutil.copytree(checkpoint.path_of(Path(other.out), 4), checkpoint.path_of(Path(settings.out), 4))
    with pytest.raises(UserError, match=r"of another architecture: its .* is"):
        train(settings)


def test_folders_in_use_or_of_others_are_refused(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    with pytest.raises(UserError, match="holds other files and no run"):
        train(recipe())
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file, expected a folder"):
        train(recipe("file"))
    (tmp_path / "busy").mkdir()
    with (tmp_path / "busy" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use by another process"):
            train(recipe("busy"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": "late"}, "unknown variant 'late'"),
        ({"overrides": {"hiden_size": 3}}, "unknown override 'hiden_size'.*did you mean 'hidden_size'"),
        ({"overrides": {"vocab_size": 100}}, "has 257 tokens but"),
        ({"batch_size": 4, "micro_batch_size": 3}, "train.batch_size is 4, expected a multiple of 3"),
        ({"data": {"sequence_length": 10**6}}, "fewer than one row"),
    ],
)
def test_mistakes_in_a_recipe_leave_nothing(recipe, changes, message):
    settings = recipe(**changes)
    with pytest.raises(UserError, match=message):
        train(settings)
    assert not Path(settings.out).exists()


def test_training_goes_on_from_a_pretrained_model(recipe):
    first = recipe("first", steps=3)
    train(first)
    settings = recipe("second", steps=1, learning_rate=1e-9, data={"tokenizer": "auto"})
    settings.model.pretrained = str(Path(first.out) / "model")
    train(settings)
    old, new = (safetensors.torch.load(weights(out)) for out in (first.out, settings.out))
    assert all(torch.allclose(old[name], new[name], atol=1e-6) for name in old)


def test_another_loss_on_some_of_the_weights_is_resumed_as_well(recipe, interrupted, monkeypatch):
    """What extending a model needs: most weights frozen, a loss of its own."""
    original = run.LatteTrainer.__init__

    def init(self, model, *args, **kwargs):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1" in name)
        kwargs["loss"] = lambda current, batch: current(**batch).loss + 0.1
        original(self, model, *args, **kwargs)

    monkeypatch.setattr(run.LatteTrainer, "__init__", init)
    train(recipe("a"))
    for step in (5, 9):
        with pytest.raises(RuntimeError):
            interrupted(recipe("b"), step, kill)
    train(recipe("b"))
    assert weights(recipe("a").out) == weights(recipe("b").out)
    kept = safetensors.torch.load_file(checkpoint.path_of(Path(recipe("a").out), 12) / "optimizer.safetensors")
    assert kept
    assert all("layers.1" in name for name in kept)


def test_learning_rate_rises_and_falls():
    settings = TrainRecipe(steps=100, warmup_steps=9, final_learning_rate_ratio=0.1)
    factors = [learning_rate_factor(step, settings) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == max(factors) == 1
    assert factors[100] == pytest.approx(0.1)
    assert factors[9:] == sorted(factors[9:], reverse=True)
    linear = TrainRecipe(steps=100, warmup_steps=0, decay="linear", final_learning_rate_ratio=0.0)
    assert learning_rate_factor(50, linear) == pytest.approx(0.5)


@pytest.mark.parametrize("variant", ["latte", "latte-r++"])
def test_weight_decay_is_on_matrices_only(variant, recipe):
    """Not on the RG-LRU's biases either, which have three axes and a mark."""
    settings = recipe(variant=variant, steps=1, overrides={"num_latents": 4})
    train(settings)
    groups = json.loads((checkpoint.path_of(Path(settings.out), 1) / "optimizer.json").read_text())["param_groups"]
    state = safetensors.torch.load(weights(settings.out))
    for group in groups:
        for name in group["params"]:
            matrix = state[name].dim() >= 2 and not name.endswith("gate_bias")
            assert (group["weight_decay"] > 0) == matrix, name


def test_nothing_in_a_run_is_pickled(recipe):
    settings = recipe(steps=1)
    train(settings)
    kinds = {
        path.suffix for path in Path(settings.out).rglob("*") if path.is_file() and "tensorboard" not in path.parts
    }
    assert kinds <= {".json", ".jsonl", ".yaml", ".safetensors", ""}
    assert yaml.safe_load((Path(settings.out) / "config.yaml").read_text())["train"]["steps"] == 1


def test_marks_decide_on_weight_decay_and_learning_rate():
    """Parameters of the RG-LRU and of a mechanism with a lower rate, in groups as their marks say."""

    class Slow(Marked):
        marks = {"rate": Mark(decay=False, learning_rate=0.1), "matrix": Mark(decay=True, learning_rate=0.1)}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.rate = torch.nn.Parameter(torch.zeros(3, 3))
            self.matrix = torch.nn.Parameter(torch.zeros(3))
            self.plain = torch.nn.Parameter(torch.zeros(3, 3))

    model = torch.nn.ModuleDict({"slow": Slow(), "feed": RGLRU(4, 2)})
    marks = marks_of(model)
    decayed = {name for name, parameter in model.named_parameters() if decays(parameter, marks.get(name))}
    assert decayed == {"slow.matrix", "slow.plain", "feed.gate_weight"}
    groups = [
        {"params": [p for n, p in model.named_parameters() if (n in decayed) == decay], "weight_decay": float(decay)}
        for decay in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.5)
    split_by_learning_rate(optimizer, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {
        (group["weight_decay"], group["lr"]): {names[id(p)] for p in group["params"]}
        for group in optimizer.param_groups
    }
    assert found == {
        (1.0, 0.5): {"slow.plain", "feed.gate_weight"},
        (1.0, 0.05): {"slow.matrix"},
        (0.0, 0.5): {"feed.gate_bias", "feed.decay"},
        (0.0, 0.05): {"slow.rate"},
    }
