"""Hybrids of ``latte extend``: layers that keep their attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from latte.cli.main import main
from latte.extend import convert
from latte.workflows.hybrid import dearest
from tests.extend.families import small_model
from tests.extend.test_convert import ids
from tests.ops.helpers import assert_close
from tests.workflows.test_extension import arguments, folder  # noqa: F401  (a fixture)
from tests.workflows.test_remembering import SETTINGS, refusal

OPTIONS = {"window": 5, "sinks": 2, "num_latents": 3, "kept": 4, "recall": True, "coupled": True}


def test_full_layers_are_those_of_the_pretrained_model() -> None:
    x, pretrained = ids(2, 40), small_model("llama")
    every = convert(small_model("llama"), OPTIONS, [0, 1, 2])
    with torch.no_grad():
        assert_close(every(x).logits, pretrained(x).logits)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_layer_replaced_alone_is_a_hybrid_of_the_others(layer: int) -> None:
    x, model = ids(2, 40), convert(small_model("llama"), OPTIONS)
    others = [other for other in range(3) if other != layer]
    hybrid = convert(small_model("llama"), OPTIONS, others)
    with torch.no_grad():
        assert_close(model.read_as("extended", x, alone=layer)[0], hybrid.read_as("extended", x)[0])


def test_a_layer_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="full_layers has 3, expected 0 to 2"):
        convert(small_model("llama"), OPTIONS, [3])


def test_the_dearest_layers_are_kept_in_order() -> None:
    assert dearest([0.1, 0.5, -0.2, 0.4], 2) == [1, 3]
    assert dearest([0.1, 0.1, 0.1], 2) == [0, 1]


def test_an_extension_keeps_the_layers_that_cost_most(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {**SETTINGS, "full_layers": 1, "judge.frontier": "[14]", "judge.frontier_context": 60}
    settings |= {"judge.frontier_documents": 2, "judge.frontier_recall": "false", "judge.max_tokens": 700}
    assert main(["extend", *arguments(folder, **settings)]) == 0
    costs = json.loads((folder / "out-run" / "replaced.json").read_text())
    results = json.loads((folder / "out" / "results.json").read_text())
    (full,) = results["full_layers"]
    assert costs[full] == max(costs)
    assert f"layers {full} keep their attention" in capsys.readouterr().err
    assert "hybrid" in [row["way"] for row in results["frontier"]["rows"]]
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert [mixer.full for mixer in model.mixers] == [layer == full for layer in range(3)]
    for mixer in model.mixers:
        assert bool(mixer.pretrained.kept) is not mixer.full
        assert (float(mixer.slot0_bias.detach().min()) == 1e4) is mixer.full  # the latents of the others are open


def test_the_plan_says_what_full_layers_take(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    assert main(["extend", *arguments(folder, **SETTINGS, full_layers=1, dry_run="true")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "whatever its length" in printed
    assert "because 1 layers keep their attention" in printed


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (3, "full_layers is 3, expected fewer than the 3 layers of the model"),
        (-1, "full_layers is -1, expected at least 0"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    count: int,
    message: str,
) -> None:
    assert message in refusal(folder, {**SETTINGS, "full_layers": count}, capsys)
