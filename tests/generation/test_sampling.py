"""The next token: one draw from the probabilities that softmax and temperature give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from latte.generation.sampling import PART, Sampling, _draw_numpy, choose, draw


@pytest.mark.parametrize("words", [1, PART - 1, PART, PART + 1, 10 * PART + 7])
def test_a_draw_is_where_the_chance_falls(words):
    random = np.random.default_rng(words)
    share = random.random(words).astype(np.float32) ** 8
    share[random.random(words) < 0.3] = 0
    share[words // 2] = 1
    if words > 2 * PART:
        share[:3] = share[-PART - 3 :] = 0  # neither the first words nor the last can be drawn
    below = share.cumsum(dtype=np.float64)
    for chance in (0.0, *random.random(500), 1 - 2**-53):
        word = _draw_numpy(share, chance)
        assert share[word] > 0
        assert below[word] - share[word] - 1e-6 * below[-1] <= chance * below[-1] <= below[word] + 1e-6 * below[-1]


def test_draws_are_those_of_probabilities_in_double_precision():
    torch.manual_seed(0)
    sampling, logits = Sampling(temperature=0.7), 2 * torch.randn(1, 1000)
    probabilities = (logits[0].double() / 0.7).softmax(dim=0)
    for seed in range(200):
        one, other = (torch.Generator().manual_seed(seed) for _ in range(2))
        assert choose(logits, [sampling], [[]], [one]) == [draw(probabilities, other)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rows_choose_as_if_alone(temperature):
    torch.manual_seed(0)
    logits = torch.randn(5, 300)
    samplings = [Sampling(temperature=temperature, seed=row) for row in range(5)]
    together = choose(logits, samplings, [[]] * 5, [s.generator("cpu") for s in samplings])
    for row, sampling in enumerate(samplings):
        assert choose(logits[row : row + 1], [sampling], [[]], [sampling.generator("cpu")]) == [together[row]]
    if not temperature:
        assert together == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite(bad):
    logits = torch.randn(1, 100)
    logits[0, 70] = bad
    sampling = Sampling(temperature=1.0)
    with pytest.raises(RuntimeError, match="expected finite logits"):
        choose(logits, [sampling], [[]], [sampling.generator("cpu")])
    logits.fill_(-float("inf"))
    with pytest.raises(RuntimeError, match="expected finite logits"):
        choose(logits, [sampling], [[]], [sampling.generator("cpu")])
