"""SLA and SLA2 against their weights written out, and what they become at their limits."""

import math

import pytest
import torch
import torch.nn.functional as F

from latte.mixers import MixerConfig, build
from latte.tokens import Tokens
from tests.mixers.oracle import perturbed
from tests.mixers.test_oracles import turned
from tests.ops.helpers import assert_close, flags, generator, normal

D, H, T, C = 8, 2, 23, 4


def mixer(name="sla", **options):
    config = MixerConfig(hidden_size=D, num_heads=H, bidirectional=True, options={"block": C, **options})
    return perturbed(build(name, config).double(), 1.0)


def features(kind, x):
    return {"softmax": x.softmax(-1), "elu": F.elu(x) + 1, "relu": x.relu()}[kind] + 1e-6


def heads(module, x):
    """q, k and v (T, H, K) of one document."""
    q, k, v = (p(x).unflatten(-1, (H, -1)) for p in (module.q_proj, module.k_proj, module.v_proj))
    if module.options.rope:
        q, k = (turned(a[None], torch.arange(len(x))[None])[0] for a in (q, k))
    return q, k, v


def chosen(q_means, k_means, keep):
    """For each block of queries, the set of key blocks that it keeps."""
    count = math.ceil(keep * len(k_means) - 1e-9)
    return [set((k_means @ mean).argsort(descending=True)[:count].tolist()) for mean in q_means]


def kept_tokens(blocks, length):
    """(T, T): token t's block keeps token s's."""
    return torch.tensor([[s // C in blocks[t // C] for s in range(length)] for t in range(length)])


def over_rows(seen, weights):
    """Weights that are seen, divided by their sum; 0 where none is."""
    weights = seen * weights
    return weights / torch.where(seen.any(-1, keepdim=True), weights.sum(-1, keepdim=True), 1.0)


def sla(module, x):
    """One document (T, D)."""
    options, out = module.options, []
    for q, k, v in zip(*(a.unbind(1) for a in heads(module, x)), strict=True):
        means = [torch.stack([part.mean(0) for part in a.split(C)]) for a in (q, k)]
        kept = kept_tokens(chosen(*means, options.keep), len(x))
        sparse = over_rows(kept, (q @ k.T / (D / H) ** 0.5).exp())
        others = ~kept if options.linear == "rest" else torch.ones_like(kept)
        linear = over_rows(others, features(options.features, q) @ features(options.features, k).T)
        out.append(sparse @ v + linear @ v @ module.linear_weight.T)
    return module.o_proj(torch.cat(out, -1))


def check_documents(module, written_out):
    """Plain rows, and padded rows of several documents."""
    g = generator(0)
    x, mask, reset = normal(g, 2, T, D), flags(g, 2, T, 0.8), flags(g, 2, T, 0.1)
    assert_close(module(x)[0], torch.stack([written_out(module, row) for row in x]))
    y, document = module(x, tokens=Tokens.of(x, mask=mask, reset=reset))[0], reset.long().cumsum(1)
    for row in range(2):
        for number in document[row].unique():
            real = (document[row] == number) & mask[row]
            if real.any():
                assert_close(y[row, real], written_out(module, x[row, real]), what=f"row {row}, document {number}")


@pytest.mark.parametrize(
    "options",
    [
        {"keep": 0.3},
        {"keep": 0.5, "linear": "rest", "features": "elu"},
        {"keep": 0.1, "linear": "rest", "features": "relu", "rope": False},
    ],
)
@torch.no_grad()
def test_sla_is_softmax_over_the_kept_blocks_beside_linear_attention(options):
    check_documents(mixer(**options), sla)


@torch.no_grad()
def test_sla_that_keeps_all_blocks_starts_as_softmax_attention():
    x = normal(generator(0), 2, T, D)
    module = build("sla", MixerConfig(D, H, bidirectional=True, options={"block": C, "keep": 1.0})).double()
    softmax = build("softmax", MixerConfig(D, H, bidirectional=True)).double()
    softmax.load_state_dict({k: v for k, v in module.state_dict().items() if k != "linear_weight"})
    assert_close(module(x)[0], softmax(x)[0])
    module.linear_weight.copy_(torch.eye(D // H))
    assert (module(x)[0] - softmax(x)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["sla", "sla2"])
def test_bad_options_are_refused(name):
    for options, message in (
        ({"block": 0}, "block is 0, expected at least 1"),
        ({"keep": 0.0}, "keep is 0.0, expected a fraction above 0, at most 1"),
        ({"keep": 1.1}, "keep is 1.1, expected a fraction above 0, at most 1"),
    ):
        with pytest.raises(ValueError, match=f"mixer '{name}': {message}"):
            mixer(name, **options)


def sla2_weights(module, x, head):
    """One document (T, D): the weights of its tokens (T, T) in a head."""
    q, k, _ = (a[:, head] for a in heads(module, x))
    q_means, k_means = (
        torch.stack([weight[head] @ part.mean(0) for part in a.split(C)])
        for a, weight in ((q, module.q_router), (k, module.k_router))
    )
    kept = kept_tokens(chosen(q_means, k_means, module.options.keep), len(x))
    block = torch.arange(len(x)) // C
    gate = torch.sigmoid(q_means @ k_means.T / (D / H) ** 0.5)[block][:, block]
    sparse = over_rows(kept, gate * (q @ k.T / (D / H) ** 0.5).exp())
    linear = over_rows(~kept, features(module.options.features, q) @ features(module.options.features, k).T)
    share = torch.sigmoid(module.share_proj(x) + module.share_bias)[:, head, None]
    share = torch.where((~kept).any(-1, keepdim=True), share, 1.0)
    return share * sparse + (1 - share) * linear


def sla2(module, x):
    v = heads(module, x)[2]
    return module.o_proj(torch.cat([sla2_weights(module, x, h) @ v[:, h] for h in range(H)], -1))


@pytest.mark.parametrize("options", [{"keep": 0.3}, {"keep": 0.5, "features": "elu", "rope": False}, {"keep": 1.0}])
@torch.no_grad()
def test_sla2_shares_the_weight_between_kept_blocks_and_the_others(options):
    check_documents(mixer("sla2", **options), sla2)


@torch.no_grad()
def test_sla2_with_the_true_share_has_the_kept_weights_of_softmax_attention():
    """Where all gates of blocks are equal, the mass of full attention on the kept blocks is the share to give them."""
    module, x = mixer("sla2", keep=0.5, rope=False), normal(generator(0), 1, T, D)
    module.q_router.zero_()
    module.share_proj.weight.zero_()
    module.share_bias.fill_(1e3)  # all weight on the kept blocks
    q, k, _ = heads(module, x[0])
    for h in range(H):
        sparse = module.look(x)["weights"].values[0, h]
        kept = sparse > 0
        assert not kept.all()
        full = (q[:, h] @ k[:, h].T / (D / H) ** 0.5).softmax(-1)
        mass = (full * kept).sum(-1, keepdim=True)
        assert_close(mass * sparse, full * kept, what=f"head {h}")


def test_the_router_and_the_shares_learn():
    module, x = mixer("sla2", keep=0.5), normal(generator(0), 2, T, D)
    module(x)[0].square().sum().backward()
    for name in ("q_router", "k_router", "share_proj.weight", "share_bias"):
        assert module.get_parameter(name).grad.abs().max() > 1e-6, name
