"""The rate of attention to come: samples of tokens, their fit, and what scores from it capture."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from latte.extend import convert
from latte.extend.attention_rate import LEAST_RECENCY, Samples, fit_rate, sample
from latte.extend.remember import attention_to_come, captured_attention
from tests.extend.families import FAMILIES, small_model
from tests.extend.test_convert import ids
from tests.extend.test_remember import OPTIONS, visited
from tests.ops.helpers import assert_close


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_are_the_attention_to_come_by_age(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latte.extend.remember.QUERIES", 7)
    monkeypatch.setattr("latte.extend.attention_rate.WINDOWS", (2, 3))
    x, T = ids(2, 40), 40
    with torch.no_grad():
        weights = small_model(family)(x, output_attentions=True).attentions
    model = convert(small_model(family), OPTIONS)
    found = iter(visited(model, x, lambda mixer, x_BTD, tokens: (mixer, x_BTD, sample(mixer, x_BTD, tokens, 1000))))
    place = torch.arange(T)
    age = place[:, None] - place
    for mixer, weights_BHTS in zip(model.mixers, weights, strict=True):
        if not mixer.pretrained.kept:
            continue
        own = mixer.pretrained.family.own_window(mixer.pretrained.original, mixer.layer)
        beyond = (age > 5) & (place >= 2) & (age <= (T if own is None else own))
        seen = beyond.any(dim=0)
        _, x_BTD, samples = next(found)
        assert torch.equal(samples.x_ND, x_BTD[:, seen].flatten(0, 1).half())
        for nth, (low, high) in enumerate(((0, 10), (10, 15), (15, T))):
            within = beyond & (age > low) & (age <= high)
            expected_BGT = (weights_BHTS * within).sum(dim=2).unflatten(1, (2, 2)).mean(dim=2)
            assert_close(samples.received_NAG[:, nth], expected_BGT[:, :, seen].transpose(1, 2).flatten(0, 1))
            assert torch.equal(samples.queries_NA[:, nth], within.sum(dim=0)[seen].float().repeat(2))
            assert torch.equal(samples.ages_NA[:, nth], (within * age).sum(dim=0)[seen].float().repeat(2))


def test_samples_are_spread_and_sum_to_the_attention_to_come() -> None:
    model, x = convert(small_model("llama"), OPTIONS), ids(1, 64)
    whole, received = (
        visited(model, x, visit)[0] for visit in (lambda *given: sample(*given, 1000), attention_to_come)
    )
    seen = received[1] > 0
    assert_close(2 * whole.received_NAG.sum(dim=1), received[0][seen])  # a mean over two heads, and their sum
    few = [visited(model, x, partial(sample, most=20, first=first))[0] for first in (0, 1)]
    assert all(10 < len(samples.x_ND) <= 20 for samples in few)
    stride = -(-len(whole.x_ND) // 20)
    assert torch.equal(few[0].x_ND, whole.x_ND[::stride])
    assert torch.equal(few[1].received_NAG, whole.received_NAG[1::stride])


def made_samples(recency: float, tokens: int = 4000) -> tuple[Samples, torch.Tensor]:
    """Samples whose attention is exactly a rate, and its coefficients of two heads."""
    draw = torch.Generator().manual_seed(0)
    x_ND = 3 * torch.randn(tokens, 5, generator=draw).half() + 1
    weight_GD = torch.tensor([[0.3, -0.2, 0.0, 0.1, 0.0], [0.0, 0.0, 0.4, 0.0, -0.1]])
    queries_NA = torch.randint(0, 9, (tokens, 3), generator=draw).float()
    age_NA = torch.rand(tokens, 3, generator=draw) * 3000 + 100
    rate_NAG = 0.001 * ((x_ND.float() @ weight_GD.T)[:, None] - recency * age_NA[..., None] / 1000).exp()
    samples = Samples(x_ND, rate_NAG * queries_NA[..., None], queries_NA, age_NA * queries_NA)
    return samples, weight_GD


@pytest.mark.parametrize("recency", [0.5, 2.0])
def test_a_rate_is_found_again(recency: float) -> None:
    samples, weight_GD = made_samples(recency)
    rate = fit_rate(samples, ridge=0.0)
    assert torch.allclose(rate.weight_GD, weight_GD, atol=5e-3)
    assert torch.allclose(rate.recency_G, torch.tensor(recency), atol=1e-2)
    assert (rate.explained_G > 0.999).all()
    given = fit_rate(samples, ridge=0.0, recency=recency)
    assert torch.equal(given.recency_G, torch.full((2,), recency))
    assert torch.allclose(given.weight_GD, weight_GD, atol=5e-3)
    strong = fit_rate(samples, ridge=1.0)
    assert (strong.weight_GD.norm(dim=1) < 0.8 * weight_GD.norm(dim=1)).all()
    assert (strong.explained_G < rate.explained_G).all()


def test_attention_that_rises_with_age_leaves_a_small_recency() -> None:
    assert torch.equal(fit_rate(made_samples(-1.0)[0], 0.0).recency_G, torch.full((2,), LEAST_RECENCY))


def test_a_fit_minimises_the_deviance() -> None:
    """No step away from it makes it smaller, which a fit to logarithms or squares would not give."""
    samples, _ = made_samples(1.0, 500)
    noise = torch.rand(samples.received_NAG.shape, generator=torch.Generator().manual_seed(1)) * 2
    samples = samples._replace(received_NAG=samples.received_NAG * noise)
    rate = fit_rate(samples, ridge=0.0)
    queries_NA, x_ND = samples.queries_NA, samples.x_ND.double()
    age_NA = samples.ages_NA / queries_NA.clamp(min=1) / 1000
    mu_NAG = ((x_ND @ rate.weight_GD.double().T)[:, None] - rate.recency_G * age_NA[..., None]).exp()
    wanted_NAG = samples.received_NAG.double()
    mu_NAG = mu_NAG * queries_NA[..., None]
    mu_NAG = mu_NAG * (wanted_NAG.sum(dim=(0, 1)) / mu_NAG.sum(dim=(0, 1)))  # the constant is free
    slope_DG = x_ND.T @ (mu_NAG - wanted_NAG).sum(dim=1)  # 0 at the optimum
    assert (slope_DG.abs() < 2e-3 * (x_ND.abs().T @ wanted_NAG.sum(dim=1))).all()


def test_nothing_beyond_the_window_is_refused() -> None:
    empty = Samples(torch.zeros(0, 5).half(), torch.zeros(0, 4, 2), torch.zeros(0, 4), torch.zeros(0, 4))
    with pytest.raises(ValueError, match="no query sees a token from beyond the window"):
        fit_rate(empty, 1e-4)


def test_fitted_scores_capture_more_than_the_first_tokens_and_the_last() -> None:
    texts, other = [ids(8, 64, seed) for seed in range(6)], ids(8, 64, 77)
    model = convert(small_model("llama"), OPTIONS)
    before = visited(model, other, captured_attention)
    taken = [visited(model, text, lambda *given: sample(*given, 1000)) for text in texts]
    share = {}
    for name, sign, recency in (("fitted", 1, 0.0), ("reversed", -1, 0.0), ("last", 0, 1.0)):
        with torch.no_grad():
            for mixer, parts in zip(model.mixers, zip(*taken, strict=True), strict=True):
                window: Any = mixer.pretrained
                whole = Samples(*(torch.cat(part) for part in zip(*parts, strict=True)))
                window.score_proj.weight.copy_(sign * fit_rate(whole, 1e-4, 0.0).weight_GD)
                window.score_recency.fill_(recency)
        share[name] = sum(part / whole for whole, part in visited(model, other, captured_attention))
    share["first"] = sum(part / whole for whole, part in before)
    assert share["fitted"] > max(share["first"], share["last"]) > share["reversed"]
