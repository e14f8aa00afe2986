"""Many requests in one running batch: each gets what it gets alone."""

from __future__ import annotations

import pytest
import torch

from latte.generation import Batch, Request, Sampling
from latte.ops import native
from latte.state import State
from tests.models.support import VARIANTS, tiny_model, token_ids

#: Mixers whose state has one size.
CONSTANT = [
    name
    for name in VARIANTS
    if all(mixer.growth == "constant" for block in tiny_model(name).body.layers for mixer in block.mixers)
]


def requests(count: int, longest: int, **settings) -> list[Request]:
    """Prompts and answers of different lengths, from the shortest to ``longest`` tokens together."""
    random = torch.Generator().manual_seed(3)
    made = []
    for index in range(count):
        total = 10 + (longest - 10) * index // (count - 1)
        prompt = int(torch.randint(2, total - 2, (), generator=random))
        made.append(Request(token_ids(1, prompt, seed=index)[0].tolist(), total - prompt, **settings))
    order = torch.randperm(count, generator=random).tolist()
    return [made[index] for index in order]


def alone(model, request: Request, **settings) -> list[int]:
    return Batch(model, **settings).run([request])[0].tokens


@pytest.mark.skipif(not native.available(), reason=native.describe())
def test_32_requests_get_the_tokens_that_each_gets_alone():
    model, asked = tiny_model("latte-r-swa++", sinks=1, num_hidden_layers=1), requests(32, 2000)
    assert {len(request.ids) + request.max_new_tokens for request in asked} >= {10, 2000}
    batch = Batch(model, max_rows=12, chunk=256)
    tickets = batch.run(asked)
    assert batch.idle
    for request, ticket in zip(asked, tickets, strict=True):
        assert ticket.ended == "length"
        assert ticket.tokens == alone(model, request, chunk=256)


@pytest.mark.skipif(not native.available(), reason=native.describe())
def test_greedy_requests_get_what_generate_writes():
    model = tiny_model("latte-r-swa++")
    asked = requests(6, 60)
    for request, ticket in zip(asked, Batch(model, max_rows=4).run(asked), strict=True):
        ids = torch.tensor([list(request.ids)])
        written = model.generate(ids, max_new_tokens=request.max_new_tokens, do_sample=False, pad_token_id=0)
        assert ticket.tokens == written[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("variant", CONSTANT)
def test_every_model_of_constant_state_gives_each_request_its_own_text(variant):
    """In float64, where no two tokens of such a model come near a tie: not all models go through the kernels."""
    model = tiny_model(variant).double()
    asked = requests(5, 40)
    for request, ticket in zip(asked, Batch(model, max_rows=3, chunk=7).run(asked), strict=True):
        assert ticket.tokens == alone(model, request, chunk=7)


@pytest.mark.skipif(not native.available(), reason=native.describe())
def test_each_request_has_its_own_sampling_and_generator():
    model = tiny_model("latte-r-swa++")
    kinds = [
        Sampling(temperature=1.0, seed=1),
        Sampling(temperature=1.0, seed=2),
        Sampling(temperature=0.7, top_k=9, seed=3),
        Sampling(temperature=1.3, top_p=0.8, min_p=0.01, repetition_penalty=1.3, seed=4),
        Sampling(repetition_penalty=1.5),
        Sampling(),
    ]
    prompt = token_ids(1, 6)[0].tolist()
    asked = [Request(prompt, 12 + index, sampling) for index, sampling in enumerate(kinds)]
    together = [ticket.tokens for ticket in Batch(model).run(asked)]
    assert together == [alone(model, request) for request in asked]
    assert together[0] != together[1][:12]
    assert len({tuple(tokens[:12]) for tokens in together}) == len(kinds)


def test_requests_join_and_leave_while_others_are_written():
    model = tiny_model("latte-r-swa++").double()
    first, second, third = (Request(token_ids(1, n, seed=n)[0].tolist(), 20) for n in (3, 9, 5))
    expected = [alone(model, request) for request in (first, second, third)]
    batch = Batch(model, max_rows=2, chunk=4)
    one = batch.submit(first)
    for _ in range(5):
        batch.step()
    two, three = batch.submit(second), batch.submit(third)
    assert 0 < len(one.tokens) < 20
    before = len(one.tokens)
    batch.step()
    assert len(one.tokens) == before + 1, "a running request waited for a prompt"
    assert not two.tokens, "nine tokens are read in pieces of four"
    while not two.tokens:
        batch.step()
    assert not one.done
    batch.cancel(two)
    batch.run()
    assert [one.tokens, three.tokens] == [expected[0], expected[2]]
    assert two.ended == "cancelled"
    assert two.tokens == expected[1][: len(two.tokens)]


def test_stop_conditions_and_streams_are_each_request_own():
    model, prompt = tiny_model("latte-r-swa++").double(), token_ids(1, 6)[0].tolist()
    text = alone(model, Request(prompt, 20))
    end, seen = text[7], list[int]()
    asked = [
        Request(prompt, 20, stop_ids={end}),
        Request(prompt, 20, stop=lambda tokens: tokens[-1:] == [end]),
        Request(prompt, 20, on_token=seen.append),
        Request(prompt, 0),
    ]
    cut = text.index(end)
    by_id, by_function, streamed, nothing = Batch(model).run(asked)
    assert (by_id.tokens, by_id.ended) == (text[:cut], "stop")
    assert (by_function.tokens, by_function.ended) == (text[: cut + 1], "stop")
    assert (streamed.tokens, seen) == (text, text)
    assert (nothing.tokens, nothing.ended) == ([], "length")


def test_a_callback_that_fails_ends_its_own_request_alone():
    model, prompt = tiny_model("latte-r-swa++").double(), token_ids(1, 6)[0].tolist()

    def fail(token: int) -> None:
        raise RuntimeError("the socket is closed")

    batch = Batch(model)
    bad, good = batch.submit(Request(prompt, 5, on_token=fail)), batch.submit(Request(prompt, 5))
    with pytest.raises(RuntimeError, match="the socket is closed"):
        batch.run()
    batch.run()
    assert (bad.ended, good.ended, len(good.tokens)) == ("failed", "length", 5)


def test_what_cannot_be_asked_is_refused():
    model = tiny_model("latte-r-swa++")
    for request, message in (
        (Request([]), "no tokens"),
        (Request([1, 97]), "the token 97, expected tokens from 0 to 96"),
        (Request([1], max_new_tokens=-1), "max_new_tokens is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            Batch(model).submit(request)
    with pytest.raises(ValueError, match="learned positions end at 64"):
        Batch(tiny_model("latte++")).submit(Request([1] * 30, 36))
    with pytest.raises(ValueError, match="'softmax' grows with the text"):
        Batch(tiny_model("transformer++"))
    with pytest.raises(ValueError, match="max_rows is 0"):
        Batch(model, max_rows=0)
    with pytest.raises(ValueError, match="top_p is 0"):
        Sampling(top_p=0.0)


def test_states_of_different_kinds_are_not_joined():
    with torch.no_grad():
        one, other = (tiny_model(name)(token_ids(1, 3)).past_key_values.state for name in ("latte++", "gla"))
    with pytest.raises(ValueError, match="different kinds or sizes"):
        State.concat([one, other])
