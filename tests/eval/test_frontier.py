"""The comparison at equal memory: its stretches, losses and errors."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from latte.eval.frontier import gap_closed, losses_of, stretches
from latte.eval.stream import Text
from latte.extend import convert
from tests.extend.families import small_model
from tests.extend.test_convert import ids

OPTIONS = {"window": 5, "sinks": 2, "num_latents": 3, "kept": 4, "coupled": True}


def test_stretches_come_from_as_many_documents_as_there_are() -> None:
    text = Text([np.arange(100), np.arange(200, 235), np.arange(300, 310)], 1)
    found = stretches(text, 20, 4)
    assert [int(piece[0]) for piece in found] == [0, 200, 20, 40]
    assert {len(piece) for piece in found} == {21}
    assert stretches(text, 100, 4) == []


def test_losses_are_those_of_whole_rows(monkeypatch) -> None:
    monkeypatch.setattr("latte.eval.frontier.CHUNK", 7)
    model, x = convert(small_model("llama"), OPTIONS).eval(), ids(3, 31)
    found, size = losses_of(model, [row.numpy() for row in x])
    with torch.no_grad():
        logits = model(x[:, :-1]).logits
    expected = F.cross_entropy(logits.mT, x[:, 1:], reduction="none").mean(dim=1)
    assert np.allclose(found, expected, atol=1e-5)
    assert size == model(x[:1], use_cache=True).past_key_values.nbytes


def test_the_closed_part_and_its_error() -> None:
    base, best = [3.0, 4.0, 5.0, 6.0], [2.0, 3.0, 3.0, 4.0]
    assert gap_closed(base, best, best) == {"gap_closed": 1.0, "standard_error": 0.0}
    assert gap_closed(base, best, base) == {"gap_closed": 0.0, "standard_error": 0.0}
    half = [(a + b) / 2 for a, b in zip(base, best, strict=True)]
    assert gap_closed(base, best, half) == {"gap_closed": 0.5, "standard_error": 0.0}
    uneven = gap_closed(base, best, [2.0, 4.0, 4.0, 5.0])
    assert uneven is not None
    assert uneven["gap_closed"] == 0.5
    # Gains 1, 0, 1, 1 of gaps 1, 1, 2, 2: residuals 0.5, -0.5, 0, 0.
    assert np.isclose(uneven["standard_error"], np.sqrt(4 * (0.5 / 3)) / 6)
    assert gap_closed(base, base, best) is None
    assert gap_closed([2.0], [1.0], [1.5]) == {"gap_closed": 0.5}
