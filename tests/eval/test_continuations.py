"""Scores of continuations: those of reading every row whole, with fewer tokens read."""

import random
from functools import cache as once

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from latte.eval.continuations import LEAST, ContinuationScorer, _Request, grouped
from latte.extend.model import convert
from latte.models import LatteForCausalLM, preset

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
WORDS = 60
OURS = ["latte-r-swa++", "transformer++", "gla", "mamba2"]


def llama():
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_key_value_heads=1, **SMALL))


@once
def model(name):
    torch.manual_seed(0)
    if name == "llama":
        return llama().eval()
    if name == "mistral":  # a sliding window shorter than the rows
        config = MistralConfig(vocab_size=WORDS, num_key_value_heads=1, sliding_window=24, **SMALL)
        return MistralForCausalLM(config).eval()
    if name == "extended":
        return convert(llama(), {"window": 16, "sinks": 2, "num_latents": 4}).eval()
    options = {"num_latents": 4, "window": 8} if "swa" in name else {}
    return LatteForCausalLM(preset(name, "tiny", vocab_size=WORDS, **SMALL, **options)).eval()


@once
def questions(shots=50):
    """Solved examples for all but two questions, which have some of their own; two to four answers of any length."""
    chance = random.Random(1)

    def words(fewest, most):
        return [chance.randrange(WORDS) for _ in range(chance.randint(fewest, most))]

    prefix, found = words(shots, shots), []
    for number in range(9):
        context = (words(shots, shots) if number in (0, 5) else prefix) + words(5, 40)
        begin = words(0, 12)  # answers may begin with the same words
        found += [(context, begin + words(1, 9)) for _ in range(chance.randint(2, 4))]
    found += [found[0], (found[1][0], found[1][1][:1]), (words(1, 1), words(3, 3))]
    chance.shuffle(found)
    return found


def whole(model, context, continuation):
    """The score by one call on the row."""
    tokens = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        logs = model(tokens[:, :-1], use_cache=False).logits.log_softmax(-1)[0, len(context) - 1 :]
    wanted = tokens[0, len(context) :]
    return float(logs.gather(-1, wanted[:, None]).sum()), bool((logs.argmax(-1) == wanted).all())


@pytest.mark.parametrize("rows", [1, 5, 32])
@pytest.mark.parametrize("name", [*OURS, "llama", "mistral", "extended"])
def test_scores_are_those_of_whole_rows(name, rows):
    scorer = ContinuationScorer(model(name), rows)
    counted: list[int] = []
    found = scorer.score(questions(), on_score=counted.append)
    for score, pair in zip(found, questions(), strict=True):
        log_probability, greedy = whole(model(name), *pair)
        assert score.log_probability == pytest.approx(log_probability, rel=1e-5, abs=1e-5)
        assert score.greedy == greedy
    assert sum(counted) == len(questions())


def test_a_likeliest_continuation_is_greedy():
    net, (context, _) = model("llama"), questions()[0]
    likeliest = net.generate(torch.tensor([context]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0].tolist()
    answer = likeliest[len(context) :]
    other = [*answer[:-1], (answer[-1] + 1) % WORDS]
    first, second, third = ContinuationScorer(net).score([(context, answer), (context, other), (context, answer[:3])])
    assert first.greedy
    assert third.greedy
    assert not second.greedy


def test_what_is_shared_is_read_once():
    scorer, apart = ContinuationScorer(model("llama")), ContinuationScorer(model("llama"), share=False)
    together, alone = scorer.score(questions()), apart.score(questions())
    assert [score.greedy for score in together] == [score.greedy for score in alone]
    assert apart.tokens_read == sum(len(context) + len(answer) - 1 for context, answer in questions())
    # The examples once, those of two questions by themselves; each question once, but for the cut at the shortest of
    # a call; every answer.
    contexts = {tuple(context) for context, _ in questions()}
    answers = sum(len(answer) - 1 for _, answer in questions())
    least = 3 * 50 + sum(len(context) - 50 for context in contexts if len(context) > 1)
    assert least < scorer.tokens_read < least + answers + 8 * len(questions())
    assert scorer.tokens_read < 0.4 * apart.tokens_read


def test_contexts_are_cut_from_the_left():
    context, answer = list(range(40)), [1, 2, 3]
    (score,) = ContinuationScorer(model("llama")).score([(context, answer)], longest=20)
    assert score.log_probability == pytest.approx(whole(model("llama"), context[-18:], answer)[0], rel=1e-5)


def test_requests_join_where_it_saves_tokens():
    def group(*rows, least=LEAST):
        return [(len(members), end) for members, end in grouped([_Request(list(row), 1) for row in rows], 0, least)]

    shared = range(20)
    assert group([*shared, 1, 2], [*shared, 3, 4]) == [(2, 20)]
    assert group([*shared, 1, 2], [*shared, 3, 4], least=21) == [(1, 21), (1, 21)]
    assert group([0, 1], [0, 2]) == [(1, 1), (1, 1)]  # a token is not worth a call
    four = [[*shared, *range(30), last, 9] for last in range(40, 44)]
    # The fifth shares 20 tokens with them; behind those the four share 30 more.
    assert group(*four, [*shared, 99, 100]) == [(5, 20)]
    # Here they would share 7 more, which three of them read by themselves: more than the fifth saves.
    few = [[*shared, *range(7), last, 9] for last in range(40, 44)]
    assert group(*few, [*shared, 99, 100]) == [(4, 27), (1, 21)]


def test_empty_and_too_long_parts_are_refused():
    scorer = ContinuationScorer(model("llama"))
    assert scorer.score([]) == []
    for pair, message in (
        (([], [1]), "a context has no tokens"),
        (([1], []), "a continuation has no tokens"),
        (([1], [1] * 9), "a continuation has 9 tokens, expected at most 8"),
    ):
        with pytest.raises(ValueError, match=message):
            scorer.score([pair], longest=8)
