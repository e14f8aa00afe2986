"""Retrieval: trials that say what they claim, and recall of a model that is known to remember or to forget."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from latte.data.tokenizer import train_bpe
from latte.eval import retrieval
from latte.eval.retrieval import DEPTHS, FOUR_FACTS, NUMBER, ONE_FACT, TASKS, draw_trial, longest_trial, retrieve

TEXT = (
    "The secret word of the castle forest river garden harbour tower market bridge is apple silver window 0123456789."
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe([TEXT], 300)


@pytest.mark.parametrize(("task", "statements"), [(ONE_FACT, 1), (FOUR_FACTS, 4), (NUMBER, 8)])
def test_a_trial_asks_for_its_first_statement(task: str, statements: int) -> None:
    for number in range(40):
        trial = draw_trial(TASKS[task], number)
        assert trial == draw_trial(TASKS[task], number)
        assert len(trial.statements) == statements == len(set(trial.statements))
        assert trial.statements[0] == f"{trial.question} {trial.choices[0]}."
        assert all(trial.question not in other for other in trial.statements[1:])
        assert len(set(trial.choices)) == 8
    assert len({draw_trial(TASKS[task], number).statements[0] for number in range(40)}) == 40


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_text_has_its_length_and_the_statement_at_its_depth(tokenizer: Any, task: str, depth: float) -> None:
    trial, context = draw_trial(TASKS[task], 3), 700
    ids = retrieval._text_of(trial, tokenizer, [7] * 5000, context, depth, 3)
    assert len(ids) == context - retrieval.FREE
    text = tokenizer.decode(ids)
    assert all(text.count(statement) == 1 for statement in trial.statements)
    assert text.endswith(trial.question)
    before = tokenizer(text[: text.index(trial.statements[0])]).input_ids
    filler = sum(token == 7 for token in ids)
    assert before.count(7) == int(depth * filler)


class Copier:
    """Predicts, after a question, what followed the same question in the last ``reach`` tokens; else always id 1."""

    device = torch.device("cpu")

    def __init__(self, reach: int, vocabulary: int) -> None:
        self.reach, self.config = reach, SimpleNamespace(vocab_size=vocabulary)

    def __call__(self, input_ids: torch.Tensor, past_key_values: Any = None, **_: Any) -> Any:
        ids = [*(past_key_values or []), *input_ids[0].tolist()]
        logits = torch.zeros(1, input_ids.shape[1], self.config.vocab_size)
        for column in range(input_ids.shape[1]):
            end = len(ids) - input_ids.shape[1] + column + 1
            seen = ids[max(0, end - self.reach) : end]
            best = 1
            for size in range(12, 2, -1):  # the longest earlier match wins
                match = [at for at in range(size, len(seen)) if seen[at - size : at] == seen[-size:]]
                if match:
                    best = seen[match[-1]]
                    break
            logits[0, column, best] = 9.0
        return SimpleNamespace(logits=logits, past_key_values=ids)


@pytest.mark.parametrize("task", TASKS)
def test_recall_is_what_a_model_remembers(tokenizer: Any, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Reader:
        def __init__(self, model: Any, tokenizer: Any) -> None:
            self.model, self.cache, self.waiting = model, None, 0

        def read_ids(self, ids: list[int]) -> None:
            self.cache, self.waiting = ids[:-1], ids[-1]

    monkeypatch.setattr(retrieval, "Reader", Reader)
    filler = [np.full(3000, 7)]
    everything, window = (
        retrieve(Copier(reach, len(tokenizer)), tokenizer, filler, 900, 6, task) for reach in (900, 250)
    )
    assert [cell["recall"] for cell in everything.values()] == [1.0] * len(DEPTHS)
    assert window["0.9"]["recall"] == 1.0
    assert window["0.1"]["recall"] < 0.5
    assert window["0.1"]["log_probability"] < everything["0.1"]["log_probability"]
    assert everything["0.1"]["standard_error"] == 0.0


def test_the_longest_trial_bounds_all_of_them(tokenizer: Any) -> None:
    longest = longest_trial(tokenizer, list(TASKS), 40)
    trial = draw_trial(TASKS[NUMBER], 0)
    size = sum(len(tokenizer(text, add_special_tokens=False).input_ids) for text in (*trial.statements, trial.question))
    assert longest >= size + retrieval.FREE
    assert longest_trial(tokenizer, [ONE_FACT], 40) < longest
