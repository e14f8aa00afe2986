"""LOTFormer against plans found by scaling matrices, and what their marginals promise."""

import pytest
import torch

from latte.mixers import MixerConfig, build
from latte.tokens import Tokens
from tests.mixers.oracle import perturbed
from tests.ops.helpers import assert_close, flags, generator, normal

D, H, T, P = 8, 2, 13, 3


def mixer(**options):
    options = {"pivots": P, "temperature": 0.5, "learned_masses": True, **options}
    return perturbed(build("lotformer", MixerConfig(D, H, bidirectional=True, options=options)).double())


def plan(score, rows, columns, rounds, last):
    """exp(score) with its rows and columns scaled in turn to these masses; ``last`` says what is scaled in the end."""
    gamma = score.exp()
    for _ in range(rounds):
        gamma = gamma * (rows / gamma.sum(1))[:, None]
        gamma = gamma * (columns / gamma.sum(0))
    return gamma * (rows / gamma.sum(1))[:, None] if last == "rows" else gamma


def attention(module, x, head, rounds):
    """n Gamma_1 diag(1/m) Gamma_2 of one document (T, D)."""
    q, k = (p(x).unflatten(-1, (H, -1))[:, head] for p in (module.q_proj, module.k_proj))
    z, mass = module.pivots[head], module.mass_logits[head].softmax(-1)
    part, scale = torch.full((len(x),), 1 / len(x), dtype=torch.float64), (D / H) ** -0.5 / 0.5
    to_pivots = plan(scale * q @ z.T, part, mass, rounds, "rows")
    to_keys = plan(scale * k @ z.T, part, mass, rounds, "columns").T
    return len(x) * to_pivots @ torch.diag(1 / mass) @ to_keys


@torch.no_grad()
def test_it_is_two_plans_through_the_pivots_of_each_document():
    module, g = mixer(rounds=3), generator(0)
    x, mask, reset = normal(g, 2, T, D), flags(g, 2, T, 0.8), flags(g, 2, T, 0.15)
    y = module(x, tokens=Tokens.of(x, mask=mask, reset=reset))[0]
    document = reset.long().cumsum(1)
    for row in range(2):
        for number in document[row].unique():
            part = x[row, (document[row] == number) & mask[row]]
            if len(part):
                v = module.v_proj(part).unflatten(-1, (H, -1))
                heads = [attention(module, part, h, 3) @ v[:, h] for h in range(H)]
                found = y[row, (document[row] == number) & mask[row]]
                assert_close(found, module.o_proj(torch.cat(heads, -1)), what=f"row {row}, document {number}")


@torch.no_grad()
def test_weights_are_doubly_stochastic_among_real_tokens_as_rounds_converge():
    x, mask = normal(generator(0), 2, T, D), flags(generator(1), 2, T, 0.7)
    module = mixer(rounds=300)
    weights = module.look(x, Tokens.of(x, mask=mask))["weights"].values
    real = mask[:, None].double().expand(2, H, T).contiguous()
    assert_close(weights.sum(-1), real, what="given by each token")
    assert_close(weights.sum(-2), real, 1e-6, what="given to each token")
    few = mixer(rounds=1).look(x, Tokens.of(x, mask=mask))["weights"].values
    assert (few.sum(-2) - real).abs().max() > 1e-3


def test_bad_options_are_refused():
    for options, message in (
        ({"pivots": 0}, "pivots is 0, expected at least 1"),
        ({"rounds": -1}, "rounds is -1, expected at least 0"),
        ({"temperature": 0.0}, "temperature is 0.0, expected a positive number"),
    ):
        with pytest.raises(ValueError, match=f"mixer 'lotformer': {message}"):
            mixer(**options)
