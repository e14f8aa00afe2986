"""Latte that forgets against its weights written out, in float64."""

import pytest
import torch
import torch.nn.functional as F

from latte.mixers import MixerConfig, build
from latte.models import LatteConfig, LatteForCausalLM
from tests.ops.helpers import assert_close, generator, normal

D, H, M, T = 8, 2, 3, 19


def mixer(decay):
    config = MixerConfig(hidden_size=D, num_heads=H, options={"num_latents": H * M, "decay": decay})
    module = build("latte", config).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(normal(generator(parameter.numel()), *parameter.shape))
    return module


@pytest.mark.usefixtures("each_backend")
@pytest.mark.parametrize("decay", ["constant", "data"])
def test_weights_of_old_tokens_fade_by_latent(decay):
    module, x = mixer(decay), normal(generator(0), 2, T, D)
    rates = module.latent_decay.expand(2, T, -1)
    rates = F.softplus(rates if decay == "constant" else rates + module.decay_proj(x)).unflatten(-1, (H, M))
    k, p = (proj(x).unflatten(-1, (H, M)) for proj in (module.latent_k_proj, module.latent_q_proj))
    total, v = rates.cumsum(1), module.values(x)
    y = torch.zeros_like(v)
    for t in range(T):
        share = (k[:, : t + 1] + total[:, : t + 1] - total[:, t, None]).softmax(1)
        y[:, t] = torch.einsum("bhm,bshm,bshv->bhv", p[:, t].softmax(-1), share, v[:, : t + 1])
    assert_close(module(x)[0], module.o_proj(y.flatten(2)))


def test_without_pace_it_is_latte():
    fading, plain = mixer("constant"), mixer("none")
    plain.load_state_dict(fading.state_dict(), strict=False)
    with torch.no_grad():
        fading.latent_decay.fill_(-1e3)
    x = normal(generator(0), 2, T, D)
    assert_close(fading(x)[0], plain(x)[0])


def test_a_model_that_forgets_generates_what_it_reads():
    """The kernels for whole models and layers know no decay: they leave it to the modules."""
    torch.manual_seed(0)
    options = {"num_latents": 8, "decay": "data", "window": 4}
    config = LatteConfig(
        vocab_size=20, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, mixer_options=options
    )
    model = LatteForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
        ids = torch.randint(0, 20, (1, 9))
        out = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        logits = model(out, use_cache=False).logits
    assert torch.equal(logits[:, 8:-1].argmax(-1), out[:, 9:])


def test_a_bidirectional_one_is_refused():
    with pytest.raises(ValueError, match="decay is 'data', expected 'none': it is bidirectional"):
        build(
            "latte",
            MixerConfig(hidden_size=D, num_heads=H, bidirectional=True, options={"num_latents": 4, "decay": "data"}),
        )
