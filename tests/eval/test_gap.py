"""How much of the gap between window and pretrained model is closed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from latte.eval.gap import SMALLEST, Gap
from latte.extend import convert
from latte.extend.losses import teacher_states
from tests.extend.families import small_model
from tests.extend.test_convert import WAYS, ids, opened


@pytest.mark.parametrize("kept", [0, 6])
def test_gap_runs_from_window_and_sinks_to_the_pretrained_model(kept: int) -> None:
    model, x = opened(convert(small_model("llama"), {**WAYS[0], "kept": kept})), ids(1, 40)
    before = [mixer.slot0_bias.detach().clone() for mixer in model.mixers]
    shut = convert(small_model("llama"), WAYS[0])  # as converted: its latents weigh nothing
    with torch.no_grad():
        known = model.logits(teacher_states(model, x, None))[:, :-1]
        # What the pretrained model holds for likeliest comes next: so it is better than what is left on the window.
        labels = torch.cat([x[:, :1], known.argmax(-1)], dim=1)
        best = float(F.cross_entropy(known[0], labels[0, 1:]))
        worst = float(F.cross_entropy(shut(x).logits[0, :-1], labels[0, 1:]))
    assert worst - best > SMALLEST
    gap = Gap([{"input_ids": x, "labels": labels, "reset": torch.zeros(1, 40, dtype=torch.bool)}])
    assert gap.closed(model, worst) == pytest.approx(0.0, abs=1e-4)
    assert gap.closed(model, best) == pytest.approx(1.0, abs=1e-4)
    assert gap.closed(model, (best + worst) / 2) == pytest.approx(0.5, abs=1e-4)
    assert all(torch.equal(old, mixer.slot0_bias) for old, mixer in zip(before, model.mixers, strict=True))
    assert {mixer.pretrained.kept for mixer in model.mixers} == {kept}


def test_a_gap_too_small_has_no_parts() -> None:
    model, x = convert(small_model("llama"), {**WAYS[0], "window": 50}), ids(1, 40)
    gap = Gap([{"input_ids": x, "labels": x, "reset": torch.zeros(1, 40, dtype=torch.bool)}])
    assert gap.closed(model, 1.0) is None
