"""Retrieval: trials that say what they claim, and recall of a model that is known to remember or to forget."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from latte.data.tokenizer import train_bpe
from latte.eval import continuations, retrieval
from latte.eval.continuations import ContinuationScorer
from latte.eval.retrieval import DEPTHS, FOUR_FACTS, NUMBER, ONE_FACT, TASKS, draw_trial, longest_trial, retrieve
from tests.models.support import tiny_model

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
        self.tokens_read = 0

    def __call__(self, input_ids: torch.Tensor, past_key_values: Any = None, logits_to_keep: int = 0, **_: Any) -> Any:
        texts = [[*past, *ids] for past, ids in zip(past_key_values or [[]] * 99, input_ids.tolist(), strict=False)]
        self.tokens_read += input_ids.numel()
        logits = torch.zeros(len(texts), logits_to_keep or 1, self.config.vocab_size)
        for row, ids in enumerate(texts):
            for column in range(logits.shape[1]):
                logits[row, column, self.next(ids[: len(ids) - logits.shape[1] + column + 1])] = 9.0
        return SimpleNamespace(logits=logits, past_key_values=texts)

    def next(self, ids: list[int]) -> int:
        seen = ids[-self.reach :]
        for size in range(12, 2, -1):  # the longest earlier match wins
            match = [at for at in range(size, len(seen)) if seen[at - size : at] == seen[-size:]]
            if match:
                return seen[match[-1]]
        return 1


@pytest.mark.parametrize("task", TASKS)
def test_recall_is_what_a_model_remembers(tokenizer: Any, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuations, "forkable", lambda cache: True)
    monkeypatch.setattr(
        continuations, "select", lambda cache, rows: None if cache is None else [cache[row] for row in rows]
    )
    filler = [np.full(3000, 7)]
    models = [Copier(reach, len(tokenizer)) for reach in (900, 250)]
    everything, window = (retrieve(model, tokenizer, filler, 900, 6, task) for model in models)
    assert [cell["recall"] for cell in everything.values()] == [1.0] * len(DEPTHS)
    assert window["0.9"]["recall"] == 1.0
    assert window["0.1"]["recall"] < 0.5
    assert window["0.1"]["log_probability"] < everything["0.1"]["log_probability"]
    assert everything["0.1"]["standard_error"] == 0.0
    if task == ONE_FACT:  # the text before a statement is read once for all depths and trials
        assert models[0].tokens_read < 0.7 * 900 * 6 * len(DEPTHS)


def test_shared_reading_scores_as_reading_each_text_whole(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("latte-r-swa++", vocab_size=len(tokenizer))
    filler = [np.arange(3000) % 50]
    shared = retrieve(model, tokenizer, filler, 200, 3)
    monkeypatch.setattr(retrieval, "ContinuationScorer", partial(ContinuationScorer, share=False))
    whole = retrieve(model, tokenizer, filler, 200, 3)
    for depth in whole:
        assert shared[depth]["log_probability"] == pytest.approx(whole[depth]["log_probability"], abs=1e-5)


def test_the_longest_trial_bounds_all_of_them(tokenizer: Any) -> None:
    longest = longest_trial(tokenizer, list(TASKS), 40)
    trial = draw_trial(TASKS[NUMBER], 0)
    size = sum(len(tokenizer(text, add_special_tokens=False).input_ids) for text in (*trial.statements, trial.question))
    assert longest >= size + retrieval.FREE
    assert longest_trial(tokenizer, [ONE_FACT], 40) < longest
