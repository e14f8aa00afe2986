"""One token in one native call, against the blocks called one by one in torch."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn

from latte.decode.engine import MOST_ROWS
from latte.decode.program import SPARE
from latte.decode.stages import STAGES
from latte.models import LatteCache, LatteForCausalLM
from latte.models.decoder import LatteModel
from latte.ops import native
from tests.models.support import both_ways, decode, tiny_model, token_ids

pytestmark = pytest.mark.skipif(not native.available(), reason=native.describe())

MODELS = [
    ("latte-r-swa++", {}),
    ("latte-r-swa++", {"num_key_value_heads": 2, "head_dim": 6, "sinks": 2}),
    ("latte-r-swa++", {"feed_norm": True, "slot0_bias": 1.5, "softcap": 4.0, "rope": False}),
    ("latte-r-swa++", {"window": 0}),
    (
        "latte-r-swa++",
        {"layer_mixers": [{"mixer": "latte", "options": {"num_latents": 4, "window": n}} for n in (2, 9)]},
    ),
    ("latte-r++", {}),
    ("latte++", {}),
    ("latte++", {"feed_norm": True}),
    ("latte-conv++", {"conv_size": 4}),
    ("latte-conv-swa++", {"conv_size": 1}),
    ("latte-conv-swa++", {"coupled": True, "sinks": 2, "slot0_bias": 1.0}),
]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("variant", "options"), MODELS)
def test_logits_and_states_are_those_of_the_blocks(variant, options, rows, monkeypatch, calls):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-11)):
        model = tiny_model(variant, **options).to(dtype)
        calls.clear()
        with torch.no_grad():
            cache = model(token_ids(rows, 7)).past_key_values
        got, wanted, after, expected = both_ways(model, token_ids(rows, 12, seed=4), cache, monkeypatch)
        assert len(calls) == 12
        scale = float(wanted.abs().max())
        torch.testing.assert_close(got, wanted, atol=tolerance * scale, rtol=0)
        for (name, tensor), (_, other) in zip(after.state.tensors(), expected.state.tensors(), strict=True):
            assert tensor.dtype == other.dtype
            if "keys_B" in name or "values_B" in name:
                continue  # slots not in use may hold anything; the logits show the others
            torch.testing.assert_close(tensor, other, atol=100 * tolerance, rtol=tolerance)


#: Those of which the kernel also embeds and makes logits: learned positions are added outside of it.
WHOLE = [(variant, options) for variant, options in MODELS if variant != "latte++"]


@pytest.mark.parametrize(("variant", "options"), WHOLE)
def test_a_row_gives_the_same_bits_whatever_the_batch(variant, options, calls):
    model, ids = tiny_model(variant, **options), token_ids(7, 9, seed=4)
    with torch.no_grad():
        cache = model(token_ids(7, 8)).past_key_values
        alone = [cache.select(torch.tensor([row])) for row in range(7)]
        together = decode(model, ids, cache)
        for row in range(7):
            assert torch.equal(decode(model, ids[row : row + 1], alone[row]), together[row : row + 1])
            for (name, tensor), (_, other) in zip(alone[row].state.tensors(), cache.state.tensors(), strict=True):
                assert torch.equal(tensor[0], other[row]), name
    assert len(calls) == 8 * 9


@pytest.mark.parametrize(("variant", "options"), WHOLE)
def test_several_tokens_in_one_call_give_the_bits_of_one_by_one(variant, options, calls):
    """Logits behind each token and the state after each: what a draft guessed is read in one call, and cut anywhere."""
    for rows, tokens in ((1, 5), (3, SPARE)):
        model, ids = tiny_model(variant, **options), token_ids(rows, tokens, seed=4)
        with torch.no_grad():
            cache = model(token_ids(rows, 8)).past_key_values
            before = cache.fork()
            calls.clear()
            start = cache.snapshot()
            logits = model.decode_each(ids, cache)
            assert len(calls) == 1
            states = []
            for t in range(tokens):  # each state by taking back those behind it
                other = LatteCache(*start)
                model.decode_each(ids, other)
                assert other.take_back(tokens - 1 - t)
                assert other.length == before.length + t + 1
                states.append(other.state)
            assert not other.take_back(tokens + 1)
            one_by_one = before.fork()
            for t in range(tokens):
                expected = model(ids[:, t : t + 1], past_key_values=one_by_one).logits
                assert torch.equal(logits[:, t : t + 1], expected)
                for (name, tensor), (_, other) in zip(states[t].tensors(), one_by_one.state.tensors(), strict=True):
                    if "keys_B" not in name and "values_B" not in name:  # slots not in use may hold anything
                        assert torch.equal(tensor, other), (t, name)
            for (name, tensor), (_, other) in zip(start[0].tensors(), before.state.tensors(), strict=True):
                assert torch.equal(tensor, other), f"{name} was changed"
            # Gone on from the first token, the others taken back.
            assert cache.take_back(tokens - 1)
            assert torch.equal(decode(model, ids[:, 1:], cache), logits[:, 1:])
            # From a state in the middle.
            middle = LatteCache(states[1], 10)
            again = decode(model, ids[:, 2:], middle)
            assert torch.equal(again, logits[:, 2:])


def test_left_padded_rows_decode_as_each_alone(calls):
    model = tiny_model("latte-r-swa++")
    prompts, following = [token_ids(1, n, seed=n) for n in (3, 9)], token_ids(2, 6, seed=8)
    ids, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, 9 - prompt.shape[1] :], mask[row, 9 - prompt.shape[1] :] = prompt[0], 1
    with torch.no_grad():
        together = decode(model, following, model(ids, attention_mask=mask).past_key_values)
        for row, prompt in enumerate(prompts):
            alone = decode(model, following[row : row + 1], model(prompt).past_key_values)
            torch.testing.assert_close(together[row : row + 1], alone, atol=1e-5, rtol=1e-5)
    assert len(calls) == 18


def test_after_a_rollback_a_reset_and_a_reordering(monkeypatch, calls):
    model, ids = tiny_model("latte-r-swa++", sinks=1), token_ids(3, 5, seed=2)
    with torch.no_grad():
        cache = model(token_ids(3, 8)).past_key_values
        model(ids[:, :1], past_key_values=cache, reset=torch.tensor([[True], [False], [True]]))
        assert not calls
    moment, kept = cache.snapshot(), cache.fork()
    first = decode(model, ids, cache)
    cache.rollback(moment)
    for (name, tensor), (_, other) in zip(cache.state.tensors(), kept.state.tensors(), strict=True):
        assert torch.equal(tensor, other), name
    assert torch.equal(decode(model, ids, cache), first)
    cache.rollback(moment)
    cache.reorder_cache(torch.tensor([2, 0, 0]))
    got, wanted, *_ = both_ways(model, ids[[2, 0, 0]], cache, monkeypatch)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got, first[[2, 0, 0]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_is_that_of_torch(beams, monkeypatch, calls):
    model, ids = tiny_model("latte-r-swa++"), token_ids(1, 6)
    settings = {"max_new_tokens": 20, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    found = model.generate(ids, **settings)
    assert len(calls) == 19
    monkeypatch.setenv("LATTE_BACKEND", "torch")
    assert torch.equal(model.generate(ids, **settings), found)


def in_place(model: LatteForCausalLM) -> None:
    model.model.layers[1].mixer.v_proj.weight.data.mul_(1.5)


def other_memory(model: LatteForCausalLM) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = 2 * weight.data


def transposed(model: LatteForCausalLM) -> None:
    weight = model.model.layers[1].mixer.o_proj.weight
    weight.data = weight.data.t()


def other_parameter(model: LatteForCausalLM) -> None:
    feed = model.model.layers[1].mixer.feed
    feed.decay = nn.Parameter(feed.decay.detach() - 1)


def other_layer(model: LatteForCausalLM) -> None:
    mixer = model.model.layers[1].mixer
    mixer.latent_q_proj = type(mixer.latent_q_proj)(32, mixer.latent_q_proj.out_features)


def bias_inside(model: LatteForCausalLM) -> None:
    model.model.layers[1].mlp.down_proj.bias = nn.Parameter(torch.randn(32))


def loaded(model: LatteForCausalLM) -> None:
    weights = {name: weight.clone() * 0.9 for name, weight in model.state_dict().items()}
    model.load_state_dict(weights, assign=True)


def other_embedding(model: LatteForCausalLM) -> None:
    model.model.embed_tokens.weight = nn.Parameter(model.model.embed_tokens.weight.detach().flip(0))


def shorter_embeddings(model: LatteForCausalLM) -> None:
    # As it is used, the table itself is scaled, and the head with it.
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    model.model.embed_tokens.max_norm = 0.01


def other_head(model: LatteForCausalLM) -> None:
    model.lm_head = nn.Linear(32, model.config.vocab_size, bias=False)


def biased_head(model: LatteForCausalLM) -> None:
    model.lm_head = nn.Linear(32, model.config.vocab_size)


def bias_of_the_head(model: LatteForCausalLM) -> None:
    model.lm_head.bias = nn.Parameter(torch.randn(model.config.vocab_size))


def other_blocks(model: LatteForCausalLM) -> None:
    model.model.layers = nn.ModuleList(reversed(list(model.model.layers)))


def another_class(model: LatteForCausalLM) -> None:
    model.model.__class__ = Louder


CHANGES = [in_place, other_memory, transposed, other_parameter, other_layer, bias_inside, loaded, other_blocks]
CHANGES += [other_embedding, shorter_embeddings, other_head, biased_head, bias_of_the_head, another_class]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_is_changed_counts_at_the_next_token(change, monkeypatch, calls):
    model, ids = tiny_model("latte-r-swa++"), token_ids(1, 2)
    with torch.no_grad():
        cache = model(ids).past_key_values
        before = decode(model, ids, cache.fork())
        assert len(calls) == 2
        change(model)
    got, wanted, *_ = both_ways(model, ids, cache, monkeypatch)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(got, before, atol=1e-3)


class Louder(LatteModel):
    """A body of one's own."""

    def forward(self, input_ids=None, **settings):
        return super().forward(**{**settings, "inputs_embeds": 3 * self.embed_tokens(input_ids)})


class Doubled(nn.Module):
    """What an adapter does to a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.layer(x)


def test_watched_and_wrapped_layers_are_called(calls):
    model, ids = tiny_model("latte-r-swa++"), token_ids(1, 2)
    with torch.no_grad():
        cache = model(ids).past_key_values
    plain = decode(model, ids, cache.fork())
    assert len(calls) == 2
    seen: list[int] = []

    def watch(*given):
        seen.append(1)

    block = model.model.layers[0]
    inside = (block, block.mlp, block.mixer.feed, block.mixer.window, block.mixer_norm, model.model.norm)
    ends = (model.model, model.model.embed_tokens, model.model.dropout, model.lm_head)
    for module in (*inside, *ends):
        for register in (module.register_forward_hook, module.register_forward_pre_hook):
            seen.clear()
            handle = register(watch)
            calls.clear()
            torch.testing.assert_close(decode(model, ids, cache.fork()), plain, atol=1e-5, rtol=1e-5)
            handle.remove()
            assert len(seen) == 2
            assert len(calls) == (2 if module in ends else 0)  # the layers are served where only the ends are watched
    seen.clear()
    handle = nn.modules.module.register_module_forward_hook(watch)
    decode(model, ids, cache.fork())
    handle.remove()
    assert seen
    inner = block.mixer.v_proj.forward
    block.mixer.v_proj.forward = lambda x: 3 * inner(x)
    changed = decode(model, ids, cache.fork())
    del block.mixer.v_proj.forward
    assert not torch.allclose(changed, plain, atol=1e-3)
    block.mlp.up_proj = Doubled(block.mlp.up_proj)
    changed = decode(model, ids, cache.fork())
    block.mlp.up_proj = block.mlp.up_proj.layer
    assert not torch.allclose(changed, plain, atol=1e-3)
    assert torch.equal(decode(model, ids, cache.fork()), plain)


def test_everything_else_goes_through_the_blocks(monkeypatch, calls):
    model, ids = tiny_model("latte-r-swa++", dropout=0.5), token_ids(1, 1)
    with torch.no_grad():
        cache = model(token_ids(1, 4)).past_key_values
    model(ids, past_key_values=cache.fork())  # gradients are enabled
    with torch.no_grad():
        model(ids, past_key_values=cache.fork(), output_hidden_states=True)
        model(ids, past_key_values=cache.fork(), attention_mask=torch.zeros(1, 1))
        model(token_ids(1, 2), past_key_values=cache.fork())
        model(ids, past_key_values=LatteCache())
        many = MOST_ROWS + 1
        model(token_ids(many, 1), past_key_values=cache.select(torch.zeros(many, dtype=torch.long)))
        with torch.autocast("cpu", torch.bfloat16):
            model(ids, past_key_values=cache.fork())
        model.train()
        model(ids, past_key_values=cache.fork())
        model.eval()
        monkeypatch.setenv("LATTE_BACKEND", "torch")
        model(ids, past_key_values=cache.fork())
        monkeypatch.delenv("LATTE_BACKEND")
        assert not calls
        model(ids, past_key_values=cache.fork())
        assert len(calls) == 1
        monkeypatch.delitem(STAGES, "gla")
        other = tiny_model("gla")
        other(ids, past_key_values=other(ids).past_key_values)
        assert len(calls) == 1


def test_a_state_of_another_model_is_refused():
    model, ids = tiny_model("latte-r-swa++"), token_ids(1, 1)
    with torch.no_grad():
        wrong = tiny_model("latte-r-swa++", num_latents=16)(ids).past_key_values
        with pytest.raises(ValueError, match="shape"):
            model(ids, past_key_values=wrong)
        cache = model(ids).past_key_values
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="float32"):
            model.double()(ids, past_key_values=cache)


def test_copies_and_other_dtypes_step_by_themselves(calls):
    model, ids = tiny_model("latte-r-swa++"), token_ids(1, 3)
    with torch.no_grad():
        cache = model(ids).past_key_values
    wanted = decode(model, ids, cache.fork())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            model.model.layers[0].mixer_norm.weight.mul_(1.0)
            assert torch.equal(decode(twin, ids, cache.fork()), wanted)
            twin.model.layers[0].mixer_norm.weight.mul_(2.0)
        assert not torch.allclose(decode(twin, ids, cache.fork()), wanted, atol=1e-3)
        assert torch.equal(decode(model, ids, cache.fork()), wanted)
    assert len(calls) == 21


@torch.no_grad()
def test_hidden_states_and_given_embeddings(monkeypatch, calls):
    """Without ids or without a head the kernel still serves the layers."""
    model, ids = tiny_model("latte-r-swa++"), token_ids(2, 1)
    cache = model(token_ids(2, 5)).past_key_values
    wanted = model(ids, past_key_values=cache.fork()).logits
    hidden = model.model(ids, past_key_values=cache.fork()).last_hidden_state
    torch.testing.assert_close(model.lm_head(hidden), wanted, atol=1e-5, rtol=1e-5)
    embedded = model.model.embed_tokens(ids)
    torch.testing.assert_close(
        model(inputs_embeds=embedded, past_key_values=cache.fork()).logits, wanted, atol=1e-5, rtol=1e-5
    )
    assert len(calls) == 3


@torch.no_grad()
def test_ids_that_are_no_words_are_refused_and_nothing_is_read(calls):
    model = tiny_model("latte-r-swa++")
    cache = model(token_ids(1, 5)).past_key_values
    wanted = model(token_ids(1, 1), past_key_values=cache.fork()).logits
    calls.clear()
    for word in (-1, model.config.vocab_size):
        with pytest.raises(IndexError):
            model(torch.tensor([[word]]), past_key_values=cache)
    assert cache.length == 5
    assert not calls
    narrow = model(token_ids(1, 1).int(), past_key_values=cache).logits
    torch.testing.assert_close(narrow, wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("keep", [0, 1, 3])
def test_what_is_given_back(keep, calls):
    model, ids = tiny_model("latte-r-swa++"), token_ids(2, 1)
    cache = model(token_ids(2, 5)).past_key_values
    mask = torch.ones(2, 6, dtype=torch.long)
    outputs = model(ids, past_key_values=cache, attention_mask=mask, logits_to_keep=keep)
    assert outputs.logits.shape == (2, 1, model.config.vocab_size)
    assert outputs.past_key_values is cache
    assert cache.length == 6
    assert cache.state.count_B.tolist() == [6, 6]
    assert model(ids, past_key_values=cache, use_cache=False).past_key_values is None
    assert cache.length == 7
    assert len(calls) == 2


@torch.no_grad()
def test_learned_positions_are_added_to_each_token(monkeypatch, calls):
    model = tiny_model("latte-r-swa++", position_embedding="learned", max_position_embeddings=40)
    cache = model(token_ids(2, 7)).past_key_values
    got, wanted, *_ = both_ways(model, token_ids(2, 5, seed=3), cache, monkeypatch)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    assert len(calls) == 5


@torch.no_grad()
def test_replaced_weights_are_let_go(calls):
    model, ids = tiny_model("latte-r-swa++"), token_ids(1, 3)
    cache = model(ids).past_key_values
    model.model(ids[:, :1], past_key_values=cache)
    decode(model, ids, cache)
    old = weakref.ref(model.model.layers[0].mlp.up_proj)
    model.model.layers[0].mlp.up_proj = Doubled(nn.Linear(32, old().out_features, bias=False))
    decode(model, ids, cache)
    assert old() is None


@torch.no_grad()
def test_another_default_device(calls):
    model, ids = tiny_model("latte-r-swa++"), token_ids(1, 3)
    cache = model(ids).past_key_values
    wanted = decode(model, ids, cache.fork())
    with torch.device("meta"):
        got = [model(part, past_key_values=cache).logits for part in ids.split(1, dim=1)]
    assert torch.equal(torch.cat(got, dim=1), wanted)
    assert len(calls) == 6
