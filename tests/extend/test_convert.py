"""A converted model is the pretrained one, on its window: same logits, state, padding, batches and files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from latte.errors import UserError
from latte.extend import convert
from tests.extend.families import FAMILIES, small_model
from tests.ops.helpers import assert_close

OPTIONS = {"window": 64, "sinks": 2, "num_latents": 3, "feed": "conv", "coupled": True}
WAYS = [
    {"window": 4, "sinks": 2, "num_latents": 3, "feed": "conv", "coupled": True},
    {"window": 5, "sinks": 0, "num_latents": 2, "feed": "rglru", "coupled": False},
    {"window": 3, "sinks": 1, "num_latents": 2, "feed": "x", "coupled": True, "feed_norm": True},
    {"window": 3, "sinks": 1, "num_latents": 2, "coupled": True, "kept": 4, "reach": 9, "received": 0.5},
    {"window": 3, "sinks": 1, "num_latents": 2, "kept": 4, "reach": 9, "recall": True},
]
every_family = pytest.mark.parametrize("family", FAMILIES)


def ids(rows: int = 2, tokens: int = 21, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 61, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def opened(model, seed: int = 0):
    """The model with its latents at work, as after training."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.new_parameters().values():
            noise = torch.randn_like(parameter)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else 0.5 + noise.abs())
    return model


@every_family
@pytest.mark.parametrize("coupled", [True, False])
def test_with_a_long_window_it_is_the_pretrained_model(family: str, coupled: bool) -> None:
    original = small_model(family)
    expected = original(ids()).logits
    converted = convert(copy.deepcopy(original), {**OPTIONS, "coupled": coupled})
    with torch.no_grad():
        assert_close(converted(ids()).logits, expected.detach(), 1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "granite"])
def test_with_every_token_kept_it_is_the_pretrained_model(family: str) -> None:
    """Sinks and kept tokens are looked at from where they are."""
    x, original = ids(2, 40), small_model(family)
    converted = convert(copy.deepcopy(original), {**OPTIONS, "window": 6, "kept": 40, "recall": True})
    with torch.no_grad():
        assert_close(converted(x).logits, original(x).logits)


@every_family
def test_without_training_it_is_the_pretrained_model_on_window_and_sinks(family: str) -> None:
    """Against the pretrained model's own eager attention, its mask cut to the window and the sinks."""
    original = small_model(family)
    window, sinks, tokens = 6, 2, 8  # sinks + window: up to here no distance to a sink differs from the real one
    converted = convert(copy.deepcopy(original), {**OPTIONS, "window": window, "sinks": sinks})
    place = torch.arange(tokens)
    distance = place[:, None] - place
    seen = (distance >= 0) & ((distance <= window) | (place[None] < sinks))
    masks = {}
    for layer in range(original.config.num_hidden_layers):
        own = converted.family.own_window(original.config, layer)
        whole = (
            seen
            if own is None
            else (distance >= 0) & (distance <= min(own, window))
            | (seen & (distance <= own) if own > window else torch.zeros_like(seen))
        )
        masks[layer] = torch.where(whole, 0.0, -1e30)[None, None]
    for layer, block in enumerate(original.model.layers):
        block.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, layer=layer: (args, {**kwargs, "attention_mask": masks[layer]}),
            with_kwargs=True,
        )
    with torch.no_grad():
        expected, found = original(ids(tokens=tokens)).logits, converted(ids(tokens=tokens)).logits
    assert_close(found, expected, 1e-4)


@every_family
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_pieces_steps_padding_and_packing_agree_with_one_pass(family: str, way: int) -> None:
    model = opened(convert(small_model(family), WAYS[way])).eval()
    x = ids(2, 21)
    with torch.no_grad():
        whole = model(x).logits
        cache, parts = None, []
        for start, stop in ((0, 1), (1, 9), (9, 20), (20, 21)):
            output = model(x[:, start:stop], past_key_values=cache)
            cache = output.past_key_values
            parts.append(output.logits)
        assert_close(torch.cat(parts, dim=1), whole, what="pieces")
        cache, steps = None, []
        for t in range(21):
            output = model(x[:, t : t + 1], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits)
        assert_close(torch.cat(steps, dim=1), whole, what="steps")
        padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), x], dim=1)
        mask = torch.cat([torch.zeros(2, 4), torch.ones(2, 21)], dim=1).long()
        assert_close(model(padded, attention_mask=mask).logits[:, 4:], whole, what="left padding")
        reset = torch.zeros(1, 42, dtype=torch.bool)
        reset[0, [0, 21]] = True
        packed = model(x.reshape(1, 42), reset=reset).logits.reshape(2, 21, -1)
        assert_close(packed, whole, what="packed documents")


@every_family
def test_original_mode_is_the_pretrained_model(family: str) -> None:
    """What training learns from: the same model with its own full attention, documents apart."""
    original = small_model(family)
    expected = original(ids(1)).logits.detach()
    model = opened(convert(copy.deepcopy(original), WAYS[0]))
    with torch.no_grad():
        assert_close(model.logits(model.read_as("original", ids(1))[0]), expected, 1e-4)
        reset = torch.zeros(1, 42, dtype=torch.bool)
        reset[0, [0, 21]] = True
        twice = model.logits(model.read_as("original", ids(1).repeat(1, 2), reset=reset)[0])
        assert_close(twice, expected.repeat(1, 2, 1), 1e-4, what="packed")


@every_family
def test_angles_are_the_pretrained_models_own_within_its_context_and_exact_beyond(family: str) -> None:
    model = convert(small_model(family), WAYS[0])
    model(ids())
    rotary, own = model.mixers[0].pretrained.rotary, model.base.config.max_position_embeddings
    width = 2 * len(rotary.frequencies)
    x = torch.randn(1, own, 1, width, generator=torch.Generator().manual_seed(0))
    place = torch.arange(own)[None]
    config = model.base.config
    kind = [config.layer_types[0]] if config.model_type == "gemma3_text" else []
    cosine, sine = (table[:, :, None] for table in model.base.model.rotary_emb(x, place, *kind))
    first, second = x.chunk(2, dim=-1)
    expected = x * cosine + torch.cat([-second, first], dim=-1) * sine
    assert_close(rotary.turn_to(x, place), expected, 3e-7)
    far = torch.full((1, own), 10**6)
    angles = 10**6 * torch.tensor(rotary.frequencies, dtype=torch.float64)
    turned = rotary.turn_to(x.double(), far)[..., : width // 2]
    assert_close(turned, rotary.stretch * (first.double() * angles.cos() - second.double() * angles.sin()), 1e-10)


@every_family
def test_result_folder_round_trips(family: str, tmp_path: Path) -> None:
    model = opened(convert(small_model(family), WAYS[0])).eval()
    model.save_pretrained(tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".json", ".safetensors"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(ids()).logits, model(ids()).logits)


def test_generate_in_a_padded_batch_equals_each_alone() -> None:
    model = opened(convert(small_model("qwen2"), WAYS[0])).eval()
    prompts = [ids(1, tokens, seed=tokens) for tokens in (3, 9, 14)]
    length = max(prompt.shape[1] for prompt in prompts)
    batch = torch.cat([torch.nn.functional.pad(prompt, (length - prompt.shape[1], 0)) for prompt in prompts])
    mask = torch.cat([torch.arange(length)[None] >= length - prompt.shape[1] for prompt in prompts]).long()
    for beams in (1, 3):
        settings = {"max_new_tokens": 12, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
        together = model.generate(batch, attention_mask=mask, **settings)
        for row, prompt in enumerate(prompts):
            alone = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
            wanted = alone[0, prompt.shape[1] :]
            assert together[row, length : length + len(wanted)].tolist() == wanted.tolist()


def test_gradients_reach_new_weights_and_only_them_when_the_rest_is_frozen() -> None:
    model = opened(convert(small_model("gemma2"), WAYS[0]))
    new = model.new_parameters()
    model.requires_grad_(False)
    for parameter in new.values():
        parameter.requires_grad_(True)
    model(ids(), labels=ids()).loss.backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in new.values())
    assert sum(parameter.grad is not None for parameter in model.parameters()) == len(new)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_loss_is_the_cross_entropy_of_the_logits(family: str) -> None:
    model = opened(convert(small_model(family), WAYS[0])).eval()
    x = ids()
    expected = torch.nn.functional.cross_entropy(model(x).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())
    assert_close(model(x, labels=x).loss, expected, 1e-5)
    names = dict(model.named_parameters())
    weights = [names["base.model.norm.weight"], names["base.model.embed_tokens.weight"]]
    found = torch.autograd.grad(model(x, labels=x).loss, weights)
    wanted = torch.autograd.grad(expected, weights)
    for one, other in zip(found, wanted, strict=True):
        assert_close(one, other, 1e-4)


def test_refuses_what_it_cannot_convert() -> None:
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=11))
    with pytest.raises(UserError, match="type 'gpt2' can't be extended, expected one of gemma2, gemma3_text, granite"):
        convert(other, OPTIONS)
    model = small_model("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UserError, match="rotary encoding is 'dynamic'"):
        convert(model, OPTIONS)
    with pytest.raises(ValueError, match="has no option 'windw'"):
        convert(small_model("llama"), {**OPTIONS, "windw": 3})
