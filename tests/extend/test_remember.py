"""Scores of tokens worth keeping: their targets, their fit for recall, and what they capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from latte.extend import convert
from latte.extend.layer import ExtendedMixer
from latte.extend.remember import (
    ScoreSums,
    add_asked,
    attention_to_come,
    attention_when_asked,
    captured_attention,
    choose_by_attention_to_come,
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


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("block", [7, 128])
def test_attention_when_asked_is_the_most_that_questions_pay(
    family: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("latte.extend.remember.QUERIES", block)
    x, T, asked = ids(2, 40), 40, 21
    with torch.no_grad():
        weights = small_model(family)(x, output_attentions=True).attentions
    model = convert(small_model(family), OPTIONS)
    found = iter(visited(model, x, lambda *given: attention_when_asked(*given, asked)))
    place = torch.arange(T)
    distance = place[asked:, None] - place
    for mixer, weights_BHTS in zip(model.mixers, weights, strict=True):
        if not mixer.pretrained.kept:
            continue
        own = mixer.pretrained.family.own_window(mixer.pretrained.original, mixer.layer)
        beyond = (distance > 5) & (place >= 2) & (distance <= (T if own is None else own))
        expected_BGT = (weights_BHTS[:, :, asked:] * beyond).amax(dim=2).unflatten(1, (2, 2)).amax(dim=2)
        most_BTG, worth_BT = next(found)
        assert torch.equal(worth_BT, (beyond.any(dim=0) & (place < asked)).expand(2, -1))
        assert_close(most_BTG[worth_BT], expected_BGT.transpose(1, 2)[worth_BT])


def test_what_recall_is_worth_is_fitted_to_the_root_of_attention() -> None:
    model, x, asked = convert(small_model("llama"), OPTIONS), ids(3, 60), 40
    sums = [ScoreSums.empty(32, 2, torch.device("cpu")) for _ in model.mixers]

    def visit(mixer: ExtendedMixer, x_BTD: torch.Tensor, tokens: Tokens) -> Any:
        add_asked(sums[mixer.layer], mixer, x_BTD, tokens, asked)
        most_BTG, worth_BT = attention_when_asked(mixer, x_BTD, tokens, asked)
        return x_BTD[worth_BT].double(), most_BTG[worth_BT].sqrt().double()

    for each, (x_ND, y_NG) in zip(sums, visited(model, x, visit), strict=True):
        with_one = torch.cat([x_ND, torch.ones_like(x_ND[:, :1])], dim=1)
        expected = torch.linalg.lstsq(with_one, y_NG).solution
        assert_close(each.solve(0.0)[0], expected[:-1].mT)


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


def test_an_oracle_captures_more_than_the_first_tokens() -> None:
    x = ids(4, 64)
    model = convert(small_model("llama"), OPTIONS)
    first = visited(model, x, captured_attention)
    choose_by_attention_to_come(model)
    for (_, by_place), (_, by_oracle) in zip(first, visited(model, x, captured_attention), strict=True):
        assert by_oracle > 1.2 * by_place


def test_a_recency_prefers_later_tokens_of_the_same_content() -> None:
    model = convert(small_model("llama"), OPTIONS)
    window: Any = model.mixers[0].pretrained
    with torch.no_grad():
        window.score_recency.copy_(torch.tensor([0.0, 2.0]))
        x = torch.randn(1, 1, 32).expand(1, 2001, -1)
        scores = window.scores(x, Tokens.of(x))
    assert_close(scores[0, 2000] - scores[0, 0], torch.tensor([0.0, 4.0]))


def test_a_lifetime_is_the_place_at_which_a_token_goes() -> None:
    model = convert(small_model("llama"), {**OPTIONS, "recall": True})
    window: Any = model.mixers[0].pretrained
    with torch.no_grad():
        window.score_recency.copy_(torch.tensor([1.0, 2.0]))
        window.lifetime_bias.copy_(torch.tensor([1.0, 3.0]).log())
        window.recall_level.fill_(0.5)
        x = torch.randn(1, 1, 32).expand(1, 5001, -1)
        found = window.scores(x, Tokens.of(x))[0]
    # Content scores are 0: the first is worth as much as one of score 0.5 at place 1,000, the second at 3,000; a bit
    # less for later ones.
    place = torch.arange(5001.0)[:, None] / 1000
    lasting = 0.5 + torch.tensor([1.0, 6.0]) / (1 + 0.01 * place)
    assert_close(found, torch.maximum(place * torch.tensor([1.0, 2.0]), lasting))


def test_scores_of_any_lifetime_are_finite() -> None:
    model = convert(small_model("llama"), {**OPTIONS, "recall": True})
    window: Any = model.mixers[0].pretrained
    with torch.no_grad():
        window.score_recency.fill_(1.0)
        window.lifetime_proj.weight.normal_()
        found = window.scores(1e6 * torch.randn(1, 50, 32), Tokens.of(torch.zeros(1, 50, 32)))
    assert found.isfinite().all()


def test_score_parameters_are_those_that_choose() -> None:
    model = convert(small_model("llama"), OPTIONS)
    assert len(score_parameters(model)) == 2 * 3
    assert len(fixed_scores(model)) == 3 * 3  # their weight in logits too, which would weigh the place
    recalling = convert(small_model("llama"), {**OPTIONS, "recall": True})
    assert len(score_parameters(recalling)) == 5 * 3
    assert len(fixed_scores(recalling)) == 6 * 3
    assert not score_parameters(convert(small_model("llama"), {**OPTIONS, "kept": 0}))
