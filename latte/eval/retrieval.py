"""Retrieval: is something that a text said once still known at its end? One fact, four facts, a number among numbers.

Each trial puts statements into other text, reads it, and asks for one of them. A cell of the results is one depth:
where the statement that is asked for stands. The other statements of a trial, if any, are spread over the text.
"""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from latte.eval.continuations import ContinuationScorer
from latte.recipe.extend import RETRIEVAL_TASKS

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
ONE_FACT, FOUR_FACTS, NUMBER = RETRIEVAL_TASKS
PLACES = ("castle", "forest", "river", "garden", "harbour", "tower", "market", "bridge")
WORDS = ("apple", "silver", "window", "horse", "candle", "winter", "button", "bread")
DIGITS = 4
FREE = 8  # tokens of a context that stay free
SAME_FILLER = 8  # trials, one behind the other, in the same text


class Task(NamedTuple):
    """A kind of statement, and how many of them a text holds."""

    question: str
    statements: int
    numbers: bool = False

    def told(self, place: str, answer: str) -> str:
        return f"{self.question.format(place=place)} {answer}."


TASKS = {
    ONE_FACT: Task(" The secret word of the {place} is", 1),
    FOUR_FACTS: Task(" The secret word of the {place} is", 4),
    NUMBER: Task(" The number of the {place} is", len(PLACES), numbers=True),
}


class Trial(NamedTuple):
    """The statement that is asked for first, then the others; answers to choose from; and the question."""

    statements: list[str]
    choices: list[str]
    question: str


def draw_trial(task: Task, number: int) -> Trial:
    """Trial ``number`` of a task: the same for every model."""
    places = [PLACES[(number + step) % len(PLACES)] for step in range(task.statements)]
    if task.numbers:
        random = np.random.default_rng(number)
        least = 10 ** (DIGITS - 1)
        choices = answers = [str(least + int(value)) for value in random.choice(9 * least, len(PLACES), replace=False)]
    else:
        first = 3 * number + number // len(PLACES) + 1
        choices, answers = list(WORDS), [WORDS[(first + step) % len(WORDS)] for step in range(task.statements)]
    told = [task.told(place, answer) for place, answer in zip(places, answers, strict=False)]
    return Trial(told, [answers[0], *(x for x in choices if x != answers[0])], task.question.format(place=places[0]))


def longest_trial(tokenizer: PreTrainedTokenizerBase, tasks: list[str], trials: int) -> int:
    """Tokens of the statements and the question of the longest trial, and what stays free."""
    drawn = [draw_trial(TASKS[task], number) for task in tasks for number in range(min(trials, len(PLACES)))]
    sizes = (sum(len(_encode(tokenizer, text)) for text in (*trial.statements, trial.question)) for trial in drawn)
    return max(sizes, default=0) + FREE


def retrieve(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    filler: list[np.ndarray],
    context: int,
    trials: int,
    task: str = ONE_FACT,
) -> dict[str, dict[str, float]]:
    """By depth: ``recall``, the fraction of trials in which the answer is the most probable choice (of eight), its
    ``standard_error``, and ``log_probability``, the answer's mean log-probability per token.

    What texts of several depths and trials share is read once.
    """
    ground = np.concatenate(filler).tolist()
    scorer = ContinuationScorer(model)
    found: dict[str, list[list[float]]] = {str(depth): [] for depth in DEPTHS}
    for first in range(0, trials, SAME_FILLER):
        numbers = range(first, min(trials, first + SAME_FILLER))
        asked = [(str(depth), number) for number in numbers for depth in DEPTHS]
        pairs = []
        for depth, number in asked:
            trial = draw_trial(TASKS[task], number)
            text = _text_of(trial, tokenizer, ground, context, float(depth), number)
            pairs += [(text, _encode(tokenizer, f" {choice}")) for choice in trial.choices]
        each = [
            score.log_probability / len(answer) for score, (_, answer) in zip(scorer.score(pairs), pairs, strict=True)
        ]
        choices = len(pairs) // len(asked)
        for place, (depth, _) in enumerate(asked):
            found[depth].append(each[place * choices : (place + 1) * choices])
    return {depth: _cell(scores) for depth, scores in found.items()}


def _cell(trials: list[list[float]]) -> dict[str, float]:
    """The figures of one depth, of the scores of each trial's choices, the answer's first."""
    part = statistics.mean(scores[0] > max(scores[1:]) for scores in trials)  # a tie is a guess
    return {
        "recall": part,
        "standard_error": math.sqrt(part * (1 - part) / len(trials)),
        "log_probability": statistics.mean(scores[0] for scores in trials),
    }


def _text_of(
    trial: Trial, tokenizer: PreTrainedTokenizerBase, ground: list[int], context: int, depth: float, number: int
) -> list[int]:
    """Ids of ``context`` tokens: other text with the statements in it, then the question."""
    told = [_encode(tokenizer, text) for text in trial.statements]
    question = _encode(tokenizer, trial.question)
    room = context - sum(map(len, told)) - len(question) - FREE
    start = number // SAME_FILLER * SAME_FILLER * 997 % max(1, len(ground) - room)
    around = ground[start : start + room]
    # The others are spread evenly; places are counted in the text without statements.
    others = [(nth + 0.5) / (len(told) - 1) for nth in range(len(told) - 1)] if len(told) > 1 else []
    cuts = sorted(((int(share * len(around)), ids) for share, ids in zip([depth, *others], told, strict=True)))
    ids, at = [], 0
    for cut, statement in cuts:
        ids += [*around[at:cut], *statement]
        at = cut
    return [*ids, *around[at:], *question]


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)
