"""Mamba-2 against transformers' own model with the same weights."""

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from latte.layers.marks import marks_of
from latte.mixers import MixerConfig, build
from latte.models import LatteConfig, LatteForCausalLM, preset
from tests.ops.helpers import assert_close, generator, normal

#: Through every path that can serve it.
pytestmark = pytest.mark.usefixtures("each_backend")
HIDDEN, WORDS, HEAD, STATE = 12, 23, 6, 5
#: Every length up to a few of their chunks (8 tokens) and beyond.
LENGTHS = [1, 2, 3, 7, 8, 9, 16, 21, 40]


def pair(groups=1, conv=4, dtype=torch.float32):
    """Their model and ours, two layers, the same weights, all moved away from where they start."""
    theirs = Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=WORDS,
            hidden_size=HIDDEN,
            num_hidden_layers=2,
            num_heads=2 * HIDDEN // HEAD,
            head_dim=HEAD,
            state_size=STATE,
            n_groups=groups,
            chunk_size=8,
            conv_kernel=conv,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    ours = LatteForCausalLM(
        LatteConfig(
            vocab_size=WORDS,
            hidden_size=HIDDEN,
            num_hidden_layers=2,
            num_attention_heads=2,
            head_dim=HEAD,
            mixer="mamba2",
            mixer_options={"state_size": STATE, "num_groups": groups, "conv_size": conv},
            pattern=[["mixer"]],
            norm_eps=1e-5,
            tie_word_embeddings=False,
        )
    )
    if groups > 1:
        # The authors norm each group of channels by itself; Zamba2's norm does that, Mamba2's in transformers does not.
        for layer in theirs.backbone.layers:
            layer.mixer.norm = Zamba2RMSNormGated(2 * HIDDEN, 2 * HIDDEN // groups, eps=1e-5)
    g = generator(3)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * normal(g, *parameter.shape, dtype=torch.float32))
    ours.load_state_dict(dict(renamed(theirs)), strict=True)
    return theirs.to(dtype).eval(), ours.to(dtype).eval()


def renamed(theirs, of=lambda weight: weight):
    """Their weights, or what ``of`` makes of them, under our names."""
    yield "model.embed_tokens.weight", of(theirs.backbone.embeddings.weight)
    yield "model.norm.weight", of(theirs.backbone.norm_f.weight)
    yield "lm_head.weight", of(theirs.lm_head.weight)
    for i, layer in enumerate(theirs.backbone.layers):
        yield f"model.layers.{i}.mixer_norm.weight", of(layer.norm.weight)
        for name, weight in layer.mixer.named_parameters():
            value = of(weight).squeeze(1) if name == "conv1d.weight" else of(weight)
            yield f"model.layers.{i}.mixer.{name.replace('conv1d.', 'conv_')}", value


class WideTorch:
    """torch, where float32 means float64."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def widen(monkeypatch):
    """Their casts to float32 (norms, recurrence, A and the residual stream) become casts to float64."""
    monkeypatch.setattr(modeling_mamba2, "torch", WideTorch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


@torch.no_grad()
def difference(theirs, ours, T):
    """The largest of all logits, relative to the largest logit."""
    ids = torch.randint(0, WORDS, (2, T), generator=generator(T))
    wanted, found = (model(ids, use_cache=False).logits for model in (theirs, ours))
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("conv", [1, 4])
def test_logits_are_those_of_transformers(T, conv):
    assert difference(*pair(conv=conv), T) < 1e-5


@pytest.mark.parametrize("T", LENGTHS)
def test_logits_are_those_of_transformers_in_float64(T, monkeypatch):
    models = pair(dtype=torch.float64)
    widen(monkeypatch)
    assert difference(*models, T) < 1e-12


def test_transformers_computes_in_float32_whatever_the_dtype():
    """Why the test above widens their casts: without that, a float64 model is right to seven digits."""
    assert 1e-9 < difference(*pair(dtype=torch.float64), 40) < 1e-5


@pytest.mark.parametrize("groups", [2, 4])
def test_groups_share_keys_and_are_normed_by_themselves(groups):
    assert difference(*pair(groups), 40) < 1e-5


def test_gradients_are_those_of_transformers(monkeypatch):
    theirs, ours = pair(dtype=torch.float64)
    widen(monkeypatch)
    ids = torch.randint(0, WORDS, (2, 21), generator=generator(0))
    for model in (theirs, ours):
        model(ids, use_cache=False).logits.square().mean().backward()
    weights = dict(ours.named_parameters())
    for name, wanted in renamed(theirs, of=lambda weight: weight.grad):
        assert_close(weights[name].grad, wanted, 1e-11, what=name)


def test_greedy_decoding_is_that_of_transformers():
    theirs, ours = pair()
    prompt = torch.randint(0, WORDS, (2, 11), generator=generator(0))
    wanted, found = (model.generate(prompt, max_new_tokens=30, do_sample=False) for model in (theirs, ours))
    assert torch.equal(found, wanted)
    assert len(set(found[0, 11:].tolist())) > 3, "a loop of a few words would say little"


@torch.no_grad()
def test_logits_along_cached_decoding_are_those_of_transformers():
    """Prefill of 11 tokens, then one by one, against their pass over all."""
    theirs, ours = pair()
    ids = torch.randint(0, WORDS, (2, 40), generator=generator(1))
    wanted = theirs(ids, use_cache=False).logits
    out = ours(ids[:, :11], use_cache=True)
    parts = [out.logits]
    for t in range(11, 40):
        out = ours(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
        parts.append(out.logits)
    found = torch.cat(parts, dim=1)
    assert_close(found, wanted, 1e-5)


def test_the_preset_is_the_homogeneous_stack_of_the_paper():
    with torch.device("meta"):
        model = LatteForCausalLM(preset("mamba2", "paper-150m"))
    block = model.model.layers[0]
    assert block.roles == ["mixer"]
    assert (block.mixer.num_heads, block.mixer.config.width, block.mixer.options.state_size) == (24, 64, 128)
    plain = {name.rpartition(".")[2] for name, mark in marks_of(model).items() if mark.decay is False and mark.float32}
    assert plain == {"A_log", "D", "dt_bias"}


def test_sizes_that_do_not_fit_are_refused():
    def make(**options):
        fields = {"head_dim": options.pop("head_dim", None)}
        return build("mamba2", MixerConfig(hidden_size=8, num_heads=2, options=options, **fields))

    with pytest.raises(ValueError, match=r"mixer 'mamba2': expand \* hidden_size is 16, .* multiple of head_dim \(5\)"):
        make(head_dim=5)
    with pytest.raises(ValueError, match=r"mixer 'mamba2': number of heads is 4, .* multiple of num_groups \(3\)"):
        make(num_groups=3)
    with pytest.raises(ValueError, match="mixer 'mamba2': state_size is 0, expected at least 1"):
        make(state_size=0)


def test_parameters_start_where_the_paper_says():
    mixer = build("mamba2", MixerConfig(hidden_size=512, num_heads=512, options={"state_size": 4}))
    step, rate = torch.nn.functional.softplus(mixer.dt_bias), mixer.A_log.exp()
    assert 0.9e-3 < step.min() < 2e-3
    assert 0.5e-1 < step.max() < 1.01e-1
    assert 1 <= rate.min() < 1.5
    assert 15 < rate.max() <= 16
    assert (mixer.D == 1).all()
