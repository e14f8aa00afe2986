"""Log-linear Mamba-2 against its equation written out pair by pair, and against Mamba-2."""

import pytest
import torch
import torch.nn.functional as F

from latte.layers.marks import marks_of
from latte.mixers import MixerConfig, build
from latte.models import LatteConfig, LatteForCausalLM, preset
from latte.ops import log_linear_attention
from latte.tokens import Tokens
from tests.ops.helpers import assert_close, generator, normal
from tests.ops.test_log_linear import quadratic

#: Through every path that can serve it.
pytestmark = pytest.mark.usefixtures("each_backend")
D, WIDTH = 8, 4


def mixer(name="log-linear-mamba2", **options):
    """A mixer in float64 with weights large enough to matter."""
    config = MixerConfig(hidden_size=D, num_heads=2, options={"state_size": 3, "num_groups": 2, **options})
    module, g = build(name, config).double(), generator(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5 * normal(g, *parameter.shape))
    return module


def written_out(m, u):
    """One document (T, D) through the layer, the recurrence as a quadratic mask."""
    T, H, inner, keys = u.shape[0], 4, 16, 6
    z, xBC, dt = (u @ m.in_proj.weight.T).split([inner, inner + 2 * keys, H], dim=-1)
    past = F.pad(xBC, (0, 0, 3, 0))
    xBC = F.silu(sum(past[i : i + T] * m.conv_weight[:, i] for i in range(4)) + m.conv_bias)
    x, B, C = xBC[:, :inner], xBC[:, inner : inner + keys], xBC[:, inner + keys :]
    x = x.reshape(T, H, WIDTH)
    B, C = (y.reshape(T, 2, 3).repeat_interleave(2, dim=1) for y in (B, C))
    step = torch.log1p(torch.exp(dt + m.dt_bias))
    weights = torch.log1p(torch.exp((u @ m.level_proj.weight.T) * m.level_scale)).reshape(T, H, -1)
    y = quadratic(C, B, step[..., None] * x, -m.A_log.exp() * step, weights) + m.D[:, None] * x
    gated = (y.reshape(T, inner) * z * torch.sigmoid(z)).reshape(T, 2, inner // 2)
    normed = gated / (gated.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return (normed.reshape(T, inner) * m.norm.weight) @ m.out_proj.weight.T


@pytest.mark.parametrize("T", [1, 2, 9, 64, 100])
def test_the_layer_is_its_equation(T):
    m, u = mixer(), normal(generator(T), 2, T, D)
    with torch.no_grad():
        y, _ = m(u)
        assert_close(y, torch.stack([written_out(m, row) for row in u]))


def test_packed_and_padded_documents_are_trees_of_their_own():
    m, u = mixer(max_levels=8), normal(generator(0), 1, 130, D)
    mask = torch.rand(1, 130, generator=generator(1)) < 0.8
    reset = torch.zeros(1, 130, dtype=torch.bool)
    reset[0, [30, 100]] = True
    with torch.no_grad():
        y, _ = m(u, tokens=Tokens.of(u, mask=mask, reset=reset))
        for span in (slice(0, 30), slice(30, 100), slice(100, 130)):
            chosen = mask[0, span]
            assert_close(y[0, span][chosen], written_out(m, u[0, span][chosen]))


@pytest.mark.parametrize("T", [1, 70])
def test_with_weights_of_one_it_is_mamba2(T):
    lifted, plain = mixer(), mixer("mamba2")
    missing, extra = plain.load_state_dict(lifted.state_dict(), strict=False)
    assert not missing
    assert set(extra) == {"level_proj.weight", "level_scale"}
    lifted.level_weights = lambda u: torch.ones(*u.shape[:2], 4, 16, dtype=u.dtype)
    u = normal(generator(T), 2, T, D)
    assert_close(lifted(u)[0], plain(u)[0])


def test_weights_start_at_the_logarithm_of_two_around_which_the_input_moves_them():
    m = build("log-linear-mamba2", MixerConfig(hidden_size=D, num_heads=2, options={"max_levels": 6}))
    assert (m.level_scale == 1).all()
    assert marks_of(m)["level_scale"].decay is False
    weights = m.level_weights(torch.zeros(1, 1, D))
    assert weights.shape == (1, 1, 4, 6)
    assert_close(weights, torch.full_like(weights, 2.0).log())


@torch.no_grad()
def test_a_model_decodes_from_a_state_that_grows_with_the_logarithm():
    torch.manual_seed(0)
    config = LatteConfig(
        vocab_size=29,
        hidden_size=D,
        num_hidden_layers=2,
        num_attention_heads=2,
        mixer="log-linear-mamba2",
        mixer_options={"state_size": 4},
        pattern=[["mixer"]],
        initializer_range=0.5,
    )
    model = LatteForCausalLM(config).double().eval()
    ids = torch.randint(0, 29, (2, 70), generator=generator(0))
    wanted = model(ids, use_cache=False).logits
    out, parts = None, []
    for t in range(70):
        out = model(ids[:, t : t + 1], past_key_values=None if out is None else out.past_key_values, use_cache=True)
        parts.append(out.logits)
        levels = [states[0].memory.levels_BLHKV.shape[1] for states in out.past_key_values.state.layers]
        assert levels == [(t + 1).bit_length()] * 2
    assert_close(torch.cat(parts, dim=1), wanted)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="max_levels is 0, expected at least 1"):
        mixer(max_levels=0)
    with pytest.raises(ValueError, match="a document has 9 tokens, expected at most 8 with 4 level weights"):
        mixer(max_levels=4)(normal(generator(0), 1, 9, D))


def test_the_preset_is_that_of_mamba2():
    with torch.device("meta"):
        model = LatteForCausalLM(preset("log-linear-mamba2", "tiny"))
        plain = LatteForCausalLM(preset("mamba2", "tiny"))
    assert model.model.layers[0].roles == ["mixer"]
    assert model.model.layers[0].mixer.growth == "log"
    assert model.num_parameters() > plain.num_parameters()


def test_delta_rule_with_all_weights_one_is_gated_deltanet():
    """The levels then add up to one state."""
    config = {"hidden_size": 8, "num_heads": 2}
    lifted, host = (
        build(name, MixerConfig(**config)).double() for name in ("log-linear-gated-deltanet", "gated-deltanet")
    )
    host.load_state_dict({name: weight for name, weight in lifted.state_dict().items() if "level" not in name})
    lifted.level_weights = lambda x: torch.full((*x.shape[:2], 2, 16), host.key_width**-0.5, dtype=x.dtype)
    x = normal(generator(0), 2, 150, 8)
    with torch.no_grad():
        assert_close(lifted(x)[0], host(x)[0], 1e-11)


def test_delta_rule_follows_the_weights_of_all_pairs():
    """y = ((tril(QK^T) T0) . D . Lambda) V over the whole row, T0 = (I + tril(beta KK^T, -1))^-1 beta."""
    g, T = generator(1), 100
    q, k, v = normal(g, T, 3), torch.nn.functional.normalize(normal(g, T, 3), dim=-1), normal(g, T, 2)
    beta, log_decay, weights = normal(g, T).sigmoid(), -0.1 * normal(g, T).abs(), normal(g, T, 9)
    system = torch.eye(T, dtype=q.dtype) + (beta[:, None] * (k @ k.T)).tril(-1)
    places = torch.arange(T)
    level = torch.tensor([[int(t ^ s).bit_length() for s in range(T)] for t in range(T)])
    total = log_decay.cumsum(0)
    decay = (total[:, None] - total).clamp(max=0).exp()
    pairs = (q @ k.T).tril() @ torch.linalg.inv(system) * beta
    expected = (pairs * decay * weights[places[:, None], level]).tril() @ v
    one = [x[None, :, None] for x in (q, beta[:, None] * k, v)]
    erase = (log_decay.exp()[:, None] * k)[None, :, None]
    y, _ = log_linear_attention(*one, log_decay[None, :, None], weights[None, :, None], erase)
    assert_close(y[0, :, 0], expected, 1e-11)
