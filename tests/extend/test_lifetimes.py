"""Lifetimes: as many tokens as asked for are kept at a time, whatever the length."""

from __future__ import annotations

import pytest
import torch

from latte.extend.lifetimes import level_of, lifetimes

TOKENS = 40_000


@pytest.mark.parametrize(("kept", "recency"), [(100.0, 1.0), (500.0, 1.0), (300.0, 2.5)])
def test_a_level_keeps_as_many_tokens_at_a_time_as_wanted(kept: float, recency: float) -> None:
    score_NG = torch.randn(TOKENS, 2, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 3.0]) + 5
    level_G = level_of(score_NG, kept, recency)
    stays = (score_NG - level_G) / recency * 1000  # tokens
    age = (TOKENS - 1 - torch.arange(TOKENS))[:, None]
    assert torch.allclose((stays > age).sum(dim=0).float(), torch.tensor(kept), rtol=0.2)
    assert torch.allclose(stays.clamp(min=0).mean(dim=0), torch.tensor(kept), rtol=1e-3)


@pytest.mark.parametrize("kept", [50.0, 120.0])
def test_about_as_many_tokens_stay_at_every_length(kept: float) -> None:
    # Exponential tails, for which lifetimes are exact.
    worth_NG = torch.rand(TOKENS, 2, generator=torch.Generator().manual_seed(1)).log().neg() * torch.tensor([0.1, 2.0])
    slope_G, offset_G = lifetimes(worth_NG, kept)
    stays = (offset_G + slope_G * worth_NG).exp() * 1000
    for length in (2_000, 8_000, 32_000):
        alive = (stays[:length] > length).sum(dim=0).float()
        assert torch.allclose(alive, torch.tensor(kept), rtol=0.4)


def test_tokens_of_one_worth_have_a_lifetime() -> None:
    slope_G, offset_G = lifetimes(torch.ones(100, 2), 8.0)
    assert torch.allclose(offset_G + slope_G, torch.tensor(8.0 * 16 / 1000).log(), atol=0.5)
