"""Two processes give what one gives, whole or sharded, and one goes on with what two saved."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from latte.loading.layout import read_metrics
from latte.recipe import to_yaml
from latte.train import checkpoint, train

STRATEGIES = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def runs(make_recipe, tmp_path_factory):
    """The same 20 steps by one process, and by two with each strategy."""
    folder = tmp_path_factory.mktemp("processes")
    settings = {"steps": 20, "save_every": 10, "log_every": 1, "learning_rate": 5e-3, "micro_batch_size": 2}
    recipe = make_recipe(folder / "one", "latte-r-swa++", **settings)
    train(recipe)
    (folder / "recipe.yaml").write_text(to_yaml(recipe))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    script = str(Path(__file__).with_name("two_processes.py"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, script, str(folder / "recipe.yaml"), *STRATEGIES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, recipe


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_have_the_loss_of_one(runs, strategy):
    folder, _ = runs
    one, two = (read_metrics(folder / name) for name in ("one", strategy))
    assert [line["step"] for line in one if "loss" in line] == list(range(1, 21))
    for a, b in zip(one, two, strict=True):
        key = "loss" if "loss" in a else "valid_loss"
        assert abs(a[key] - b[key]) < 1e-5, a["step"]
    kinds = [(folder / strategy / f"kinds-{rank}").read_text() for rank in range(2)]
    assert kinds == ["DTensor" if strategy == "fsdp" else "Parameter"] * 2
    assert torch.is_tensor(next(iter(final(folder / strategy).values())))
    for name, tensor in final(folder / "one").items():
        assert torch.allclose(tensor, final(folder / strategy)[name], atol=1e-4), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_process_goes_on_with_what_two_saved(runs, strategy, tmp_path, capfd):
    folder, recipe = runs
    shutil.copytree(folder / strategy, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(checkpoint.path_of(tmp_path / "run", 20))
    recipe.out = str(tmp_path / "run")
    train(recipe)
    assert "going on from step 10 of 20" in capfd.readouterr().err
    one, resumed = (read_metrics(path) for path in (folder / "one", tmp_path / "run"))
    assert [line["step"] for line in resumed] == [line["step"] for line in one]
    for a, b in zip(one, resumed, strict=True):
        assert abs(a.get("loss", 0) - b.get("loss", 0)) < 1e-5, a["step"]


def final(run):
    return safetensors.torch.load_file(run / "model" / "model.safetensors")
