"""Streaming evaluation gives what one pass over the whole text gives, at any cut, for our models and others'."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from latte.errors import UserError
from latte.eval import EvalRecipe, Text, evaluate
from latte.eval.run import default_contexts
from latte.models import LatteForCausalLM, preset

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


def make(kind):
    torch.manual_seed(0)
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, max_position_embeddings=4096))
    else:
        options = {"num_latents": 4, "window": 6} if kind == "latte-r-swa++" else {}
        options = {"num_latents": 4, "max_position_embeddings": 64} if kind == "latte" else options
        model = LatteForCausalLM(preset(kind, **SMALL, **options))
    for parameter in model.parameters():  # larger weights, so that the context matters
        parameter.data.mul_(4)
    return model.eval()


def text(*lengths):
    chance = np.random.default_rng(0)
    return Text([chance.integers(0, 50, length) for length in lengths], num_bytes=2 * sum(lengths))


def direct(model, documents, context):
    """The definition: every stretch in one pass."""
    losses = []
    for document in documents:
        for start in range(0, len(document) - 1, context):
            piece = torch.from_numpy(document[start : start + context + 1])[None]
            with torch.no_grad():
                logits = model(piece[:, :-1]).logits
            losses.append(F.cross_entropy(logits[0], piece[0, 1:], reduction="none"))
    return losses


@pytest.mark.parametrize("kind", ["latte-r-swa++", "transformer++", "llama"])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_equals_the_definition_at_any_chunk(kind, chunk):
    model, sample = make(kind), text(61, 5, 1, 40)
    result = evaluate(model, sample, [8, 25, 61], chunk=chunk)
    for measured in result.contexts:
        expected = torch.cat(direct(model, sample.documents, measured.context))
        assert measured.tokens == len(expected) == 60 + 4 + 39
        assert measured.loss == pytest.approx(float(expected.mean()), abs=1e-5)
        assert measured.perplexity == pytest.approx(math.exp(float(expected.mean())), rel=1e-4)
        assert measured.bits_per_byte == pytest.approx(float(expected.sum()) / math.log(2) / sample.num_bytes, rel=1e-5)
        part = torch.arange(103) * 32 // 103  # of consecutive tokens in the order of the text
        parts = torch.stack([expected[part == index].mean() for index in range(32)])
        assert measured.parts == pytest.approx(parts.tolist(), abs=1e-5)
        assert measured.standard_error == pytest.approx(float(parts.std() / 32**0.5), abs=1e-5)
    assert len({round(measured.loss, 4) for measured in result.contexts}) == 3


def test_loss_by_position_is_the_mean_over_its_tokens():
    model, sample = make("latte-r-swa++"), text(70, 30)
    places = evaluate(model, sample, [64]).positions
    losses = direct(model, sample.documents, 64)
    assert places[0].first == 1
    assert places[-1].last == 64
    assert [place.last + 1 for place in places[:-1]] == [place.first for place in places[1:]]
    for place in places:
        expected = torch.cat([loss[place.first - 1 : place.last] for loss in losses])
        assert place.tokens == len(expected)
        assert place.loss == pytest.approx(float(expected.mean()), abs=1e-5)


def test_state_does_not_grow_with_the_context_but_a_cache_does():
    sample = text(600)
    state = [row.state_bytes for row in evaluate(make("latte-r-swa++"), sample, [50, 500]).contexts]
    cache = [row.state_bytes for row in evaluate(make("llama"), sample, [50, 500]).contexts]
    assert state[0] == state[1] > 0
    assert cache[1] == 10 * cache[0]


def test_mistakes():
    with pytest.raises(UserError, match="no text to evaluate"):
        evaluate(make("latte-r-swa++"), text(1), [8])
    with pytest.raises(UserError, match="context of 0 tokens"):
        evaluate(make("latte-r-swa++"), text(9), [0])
    with pytest.raises(UserError, match="context of 65 tokens was asked for, expected 1 to 64"):
        evaluate(make("latte"), text(9), [65])


def test_contexts_that_no_document_reaches_are_not_measured():
    model = make("latte-r-swa++")
    result = evaluate(model, text(30, 12), [8, 30, 31, 4096])
    assert [row.context for row in result.contexts] == [8, 30]
    assert (result.unreached, result.longest_document) == ([31, 4096], 30)
    with pytest.raises(UserError, match="no document reaches a context of 31 tokens, the longest has 30"):
        evaluate(model, text(30), [31])
    asked = EvalRecipe(model="nowhere")
    assert default_contexts(asked, model, text(300)) == [128, 256]
    assert default_contexts(asked, model, text(30)) == [30]  # all of it
