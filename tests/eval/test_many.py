"""A file of prompts, continued together by one command."""

from __future__ import annotations

import json

import pytest

from latte.cli.main import main
from latte.errors import UserError
from latte.eval.many import continue_all, read_prompts
from latte.recipe import GenerateRecipe
from tests.eval.test_generate import byte_tokenizer, make

TEXTS = ["def main():", "import os", "x", "a longer prompt, of several words"]


def test_many_prompts_get_the_answers_of_each_alone(tmp_path, capsys):
    make().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    lines = [{"prompt": text, "seed": index, "max_new_tokens": 6 + index} for index, text in enumerate(TEXTS)]
    (tmp_path / "prompts.jsonl").write_text("\n\n".join(map(json.dumps, lines)))
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    common = ["generate", str(tmp_path / "model"), "--stop-at-end", "false", "--rows", "3"]
    assert main([*common, "--prompts-file", str(tmp_path / "prompts.jsonl")]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["prompt"] for answer in answers] == TEXTS
    for index, answer in enumerate(answers):
        assert (answer["new_tokens"], answer["ended"]) == (6 + index, "length")
        own = ["--seed", str(index), "--max-new-tokens", str(6 + index)]
        assert main([*common, *own, "--prompt", TEXTS[index]]) == 0
        assert capsys.readouterr().out.rstrip("\n") == answer["text"].rstrip("\n")
    assert main([*common, "--prompts-file", str(tmp_path / "prompts.txt"), "--temperature", "0"]) == 0
    assert [json.loads(line)["prompt"] for line in capsys.readouterr().out.splitlines()] == TEXTS


def test_stop_strings_end_each_answer_and_growing_states_are_served_one_by_one():
    model, tokenizer = make(), byte_tokenizer()
    recipe = GenerateRecipe(max_new_tokens=40, temperature=0.0, stop_at_end=False)
    free = list(continue_all(model, tokenizer, prompts_of(TEXTS, recipe), 4))
    stop = free[0].text[5:7]
    stopped = list(continue_all(model, tokenizer, prompts_of(TEXTS, recipe, stop=[stop]), 4))
    assert stopped[0].ended == "stop"
    assert stopped[0].text == free[0].text[: free[0].text.index(stop)]
    said = list[str]()
    other = make("transformer++")
    alone = list(continue_all(other, tokenizer, prompts_of(TEXTS, recipe), 4, said.append))
    assert [answer.new_tokens for answer in alone] == [40] * len(TEXTS)
    assert "one prompt after another: the state of mixer 'softmax' grows" in said[0]


def prompts_of(texts, recipe, **settings):
    from dataclasses import replace

    from latte.eval.many import Prompt

    return [Prompt(text, replace(recipe, **settings)) for text in texts]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ('{"text": "a"}', "has no text 'prompt'"),
        ('{"prompt": "a", "temprature": 1}', "has 'temprature', expected some of"),
        ('{"prompt": "a", "top_k": "many"}', "top_k is 'many', expected a value such as 0"),
        ('{"prompt": "a", "top_p": 3}', "top_p is 3"),
        ("", "has no prompts"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path, line, message):
    (tmp_path / "prompts.jsonl").write_text(line)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / "prompts.jsonl", GenerateRecipe())
    for both in ({"prompt": "a"}, {"load_state": "b"}):
        with pytest.raises(UserError, match="both prompts_file and"):
            GenerateRecipe(prompts_file="p", **both)
