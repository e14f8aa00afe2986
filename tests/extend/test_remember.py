"""Scores of tokens worth keeping: their targets, their fit, and what they capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from latte.extend import convert
from latte.extend.layer import ExtendedMixer
from latte.extend.remember import (
    ScoreSums,
    add_row,
    attention_to_come,
    captured_attention,
    fixed_scores,
    score_parameters,
)
from latte.tokens import Tokens
from tests.extend.families import FAMILIES, small_model
from tests.extend.test_convert import ids
from tests.ops.helpers import assert_close

OPTIONS: dict[str, Any] = {"window": 5, "sinks": 2, "num_latents": 3, "kept": 4, "coupled": True}


def visited(model: Any, x: torch.Tensor, visit: Any, reset: torch.Tensor | None = None) -> list[Any]:
    """What ``visit`` gives for each layer that keeps tokens, on the pretrained model's own inputs."""
    found: list[Any] = []

    def keep(mixer: ExtendedMixer, x_BTD: torch.Tensor, tokens: Tokens) -> None:
        if mixer.pretrained.kept:
            found.append(visit(mixer, x_BTD, tokens))

    with torch.no_grad():
        model.read_as("original", x, reset=reset, visit=keep)
    return found


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block", [7, 128])
def test_attention_to_come_is_that_of_the_pretrained_model(
    family: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latte.extend.remember.QUERIES", block)
    x, T = ids(2, 40), 40
    pretrained = small_model(family)
    with torch.no_grad():
        weights = pretrained(x, output_attentions=True).attentions
    model = convert(small_model(family), OPTIONS)
    found = iter(visited(model, x, attention_to_come))
    place = torch.arange(T)
    distance = place[:, None] - place
    for mixer, weights_BHTS in zip(model.mixers, weights, strict=True):
        if not mixer.pretrained.kept:  # all that the layer ever saw is in its window
            continue
        own = mixer.pretrained.family.own_window(mixer.pretrained.original, mixer.layer)
        beyond = (distance > 5) & (place >= 2) & (distance <= (T if own is None else own))
        expected_BGT = (weights_BHTS * beyond).sum(dim=2).unflatten(1, (2, 2)).sum(dim=2)
        received_BTG, queries_BT = next(found)
        assert_close(received_BTG, expected_BGT.transpose(1, 2))
        assert torch.equal(queries_BT, beyond.sum(dim=0).float().expand(2, -1))
    assert next(found, None) is None


def test_attention_to_come_stays_within_documents() -> None:
    model, x = convert(small_model("llama"), OPTIONS), ids(1, 50)
    reset = torch.zeros(1, 50, dtype=torch.bool)
    reset[:, 0] = reset[:, 18] = True
    together = visited(model, x, attention_to_come, reset)[0]
    alone = [visited(model, part, attention_to_come)[0] for part in (x[:, :18], x[:, 18:])]
    for whole, first, second in zip(together, *alone, strict=True):
        assert_close(whole, torch.cat([first, second], dim=1))


def test_sums_of_parts_give_weighted_least_squares() -> None:
    torch.manual_seed(0)
    x, y, weight = torch.randn(90, 6, dtype=torch.float64), torch.randn(90, 2, dtype=torch.float64), torch.rand(90)
    y = y + 2.0 + x[:, :2] * 3
    sums = ScoreSums.empty(6, 2, torch.device("cpu"))
    for part in (slice(0, 20), slice(20, 90)):
        sums.add(x[part], y[part], weight[part])
    found, r2 = sums.solve(0.0)
    root = weight.double().sqrt()[:, None]
    with_one = torch.cat([x, torch.ones(90, 1, dtype=torch.float64)], dim=1)
    expected = torch.linalg.lstsq(root * with_one, root * y).solution
    assert_close(found, expected[:-1].mT)
    error = (root * (with_one @ expected - y)).square().sum(dim=0)
    mean = (root.square() * y).sum(dim=0) / root.square().sum()
    assert_close(r2, 1 - error / (root * (y - mean)).square().sum(dim=0))
    assert (sums.solve(10.0)[1] < r2).all()


def test_all_tokens_capture_all_attention_and_none_nothing() -> None:
    x = ids(2, 40)
    shares = []
    for kept in (1, 8, 60):
        model = convert(small_model("llama"), {**OPTIONS, "sinks": 0, "kept": kept})
        shares.append([part / whole for whole, part in visited(model, x, captured_attention)])
    few, some, every = torch.tensor(shares)
    assert_close(every, torch.ones(3))
    assert (few < some).all()
    assert (some < every).all()


def test_fitted_scores_capture_more_than_the_first_tokens_and_the_last() -> None:
    texts, other = [ids(8, 64, seed) for seed in range(6)], ids(8, 64, 77)
    model = convert(small_model("llama"), OPTIONS)
    before = visited(model, other, captured_attention)
    sums = [ScoreSums.empty(32, 2, torch.device("cpu")) for _ in model.mixers]
    for text in texts:
        visited(model, text, lambda mixer, x, tokens: add_row(sums[mixer.layer], mixer, x, tokens))
    share = {}
    for name, sign, recency in (("fitted", 1, 0.0), ("reversed", -1, 0.0), ("last", 0, 1.0)):
        with torch.no_grad():
            for mixer, each in zip(model.mixers, sums, strict=True):
                window: Any = mixer.pretrained
                window.score_proj.weight.copy_(sign * each.solve(1e-3)[0])
                window.score_recency.fill_(recency)
        share[name] = sum(part / whole for whole, part in visited(model, other, captured_attention))
    share["first"] = sum(part / whole for whole, part in before)
    assert share["fitted"] > max(share["first"], share["last"]) > share["reversed"]


def test_a_recency_prefers_later_tokens_of_the_same_content() -> None:
    model = convert(small_model("llama"), OPTIONS)
    window: Any = model.mixers[0].pretrained
    with torch.no_grad():
        window.score_recency.copy_(torch.tensor([0.0, 2.0]))
        x = torch.randn(1, 1, 32).expand(1, 2001, -1)
        scores = window.scores(x, Tokens.of(x))
    assert_close(scores[0, 2000] - scores[0, 0], torch.tensor([0.0, 4.0]))


def test_score_parameters_are_those_that_choose() -> None:
    model = convert(small_model("llama"), OPTIONS)
    assert len(score_parameters(model)) == 2 * 3
    assert len(fixed_scores(model)) == 3 * 3  # their weight in logits too, which would weigh the place
    assert not score_parameters(convert(small_model("llama"), {**OPTIONS, "kept": 0}))
