"""Guesses change how fast a text is written, never which text, nor its distribution."""

from __future__ import annotations

import pytest
import torch

from latte.generation import Batch, ModelDraft, PromptLookup, Request, Sampling, speculate
from latte.generation.speculative import accept_or_draw
from latte.ops import native
from tests.models.support import tiny_model, token_ids

PROMPT = token_ids(1, 9)[0].tolist()


def greedy(model, prompt: list[int], count: int) -> list[int]:
    return Batch(model).run([Request(prompt, count)])[0].tokens


@pytest.mark.skipif(not native.available(), reason=native.describe())
@pytest.mark.parametrize("guesses", [1, 4, 9])
def test_guesses_of_a_model_leave_the_greedy_text(guesses):
    model, other = tiny_model("latte-r-swa++", sinks=1), tiny_model("latte-r++", num_hidden_layers=1)
    expected = greedy(model, PROMPT, 60)
    for draft in (ModelDraft(other), ModelDraft(model)):
        seen = list[int]()
        result = speculate(model, PROMPT, draft, 60, guesses=guesses, on_token=seen.append)
        assert result.tokens == seen == expected
    assert result.acceptance == 1, "the model guesses itself"
    assert result.calls == -(-59 // (guesses + 1))


@pytest.mark.parametrize("variant", ["latte++", "gla", "mamba", "transformer++", "latte-r-swa++"])
def test_models_outside_the_engine_go_back_by_reading_again(variant):
    model, draft = tiny_model(variant).double(), tiny_model("latte-r++", num_hidden_layers=1).double()
    ids = torch.tensor([PROMPT])
    expected = model.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)[0, 9:].tolist()
    assert speculate(model, PROMPT, ModelDraft(draft), 30, guesses=3).tokens == expected
    assert speculate(model, PROMPT, PromptLookup(), 30, guesses=3).tokens == expected


@pytest.mark.skipif(not native.available(), reason=native.describe())
def test_the_prompt_is_looked_up_where_the_text_repeats():
    model = tiny_model("latte-r-swa++")
    prompt = PROMPT * 5
    result = speculate(model, prompt, PromptLookup(), 120, guesses=5)
    assert result.tokens == greedy(model, prompt, 120)
    assert result.guessed > 0
    sure = PromptLookup(longest=3)
    assert sure.guess([1, 2, 3, 4, 9, 2, 3, 4], 8, 3, Sampling()).tokens == [9, 2, 3]
    assert sure.guess([1, 2, 3, 4], 4, 3, Sampling()).tokens == []
    assert sure.guess([7, 7], 2, 3, Sampling()).tokens == [7]


def test_a_stop_token_inside_the_guesses_ends_the_text():
    model = tiny_model("latte-r-swa++").double()
    text = greedy(model, PROMPT, 30)
    end = text[11]
    result = speculate(model, PROMPT, ModelDraft(model), 30, guesses=6, stop_ids={end})
    assert result.tokens == text[: text.index(end)]


@pytest.mark.parametrize("drawn", [True, False])
def test_accepting_and_rejecting_keeps_the_distribution(drawn):
    """Frequencies of 8,000 draws within five standard errors of p, for a draft that is far from it."""
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]), torch.tensor([0.05, 0.1, 0.05, 0.5, 0.3])
    random, draws = torch.Generator().manual_seed(0), 8_000
    guesses = torch.multinomial(q, draws, replacement=True, generator=random).tolist()
    counts = torch.zeros(5)
    for guess in guesses:
        counts[accept_or_draw(p, guess, q if drawn else None, random)] += 1
    error = (counts / draws - p).abs()
    assert bool((error <= 5 * (p * (1 - p) / draws).sqrt()).all()), counts / draws


def test_sampled_text_has_the_distribution_of_the_model():
    """The second and third token of many short texts, against the model's own probabilities of the pairs."""
    model, draft = tiny_model("latte-r-swa++", vocab_size=5), tiny_model("latte-r++", vocab_size=5, num_hidden_layers=1)
    sampling, prompt, texts = {"temperature": 1.3, "top_k": 4}, [1, 2, 3], 250
    expected = torch.zeros(5, 5)
    warm = Sampling(**sampling).processors()
    with torch.no_grad():
        first = warm(None, model(torch.tensor([prompt])).logits[:, -1]).softmax(-1)[0]
        for token in range(5):
            behind = warm(None, model(torch.tensor([[*prompt, token]])).logits[:, -1]).softmax(-1)[0]
            expected[token] = first[token] * behind
    for guesser in (ModelDraft(draft), PromptLookup()):
        counts = torch.zeros(5, 5)
        for seed in range(texts):
            written = speculate(model, prompt, guesser, 3, Sampling(**sampling, seed=seed), guesses=2).tokens
            counts[written[0], written[1]] += 1
        error = (counts / texts - expected).abs()
        assert bool((error <= 5 * (expected * (1 - expected) / texts).sqrt() + 1e-9).all())


def test_a_draft_of_another_vocabulary_is_refused():
    with pytest.raises(ValueError, match="the draft has 50 tokens, expected the model's 97"):
        speculate(tiny_model("latte++"), PROMPT, ModelDraft(tiny_model("latte++", vocab_size=50)))
    with pytest.raises(ValueError, match="guesses is 0"):
        speculate(tiny_model("latte++"), PROMPT, PromptLookup(), guesses=0)
