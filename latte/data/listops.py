"""ListOps of the Long Range Arena: nested lists of digits and operators, many trees at a time, level by level."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

#: Token n is SYMBOLS[n]; the first is padding, the last closes a list.
SYMBOLS = ("_", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
FIRST_DIGIT, FIRST_OPERATOR, CLOSE = 1, 11, 15
MIN, MAX, MEDIAN, SUM = range(4)
AT_ONCE = 1 << 13  # trees drawn in one go, of which about one in twelve is kept


class Level(NamedTuple):
    """The nodes of one depth of many trees, in the order of their parents."""

    parent: np.ndarray  # of each node, an index into the level above; of roots, the tree
    operator: np.ndarray  # -1 for digits
    digit: np.ndarray  # 0 for operators
    arguments: np.ndarray  # number of children


class ListOps(NamedTuple):
    """Trees as tokens: those of tree n are ``ids[starts[n]:starts[n + 1]]``."""

    ids: np.ndarray
    starts: np.ndarray
    labels: np.ndarray
    drawn: int  # trees drawn, kept or not

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)


def listops(
    trees: int, seed: int, *, shortest: int = 501, longest: int = 1999, max_depth: int = 10, max_arguments: int = 10
) -> ListOps:
    """``trees`` different trees of ``shortest`` to ``longest`` tokens, as the Long Range Arena's generator draws them.

    Below the largest depth a node is an operator with probability 1/4, of 2 to ``max_arguments`` arguments; otherwise
    it is a digit. Operators are MIN, MAX, MED (the median, cut to an integer) and SM (the sum modulo 10). Brackets
    count as tokens; an opening one is part of its operator.
    """
    ids: list[np.ndarray] = []
    labels: list[int] = []
    seen: set[bytes] = set()
    chunk = 0
    while len(labels) < trees:
        levels, sizes = draw(seed, chunk, shortest, longest, max_depth, max_arguments)
        written, values = write(levels, sizes)
        for tokens, value in zip(np.split(written, np.cumsum(sizes[0])[:-1]), values, strict=True):
            if len(labels) < trees and tokens.tobytes() not in seen:
                seen.add(tokens.tobytes())
                ids.append(tokens)
                labels.append(int(value))
        chunk += 1
    starts = np.concatenate([[0], np.cumsum([len(tokens) for tokens in ids])]).astype(np.int64)
    return ListOps(np.concatenate(ids), starts, np.array(labels, np.int64), chunk * AT_ONCE)


def draw(
    seed: int, chunk: int, shortest: int, longest: int, max_depth: int, max_arguments: int
) -> tuple[list[Level], list[np.ndarray]]:
    """The levels of those of ``AT_ONCE`` trees whose length is asked for, and the length of every node."""
    # Raw numbers of Philox and integer arithmetic: the same trees on every machine and in every version of numpy.
    philox = np.random.Philox(key=[seed, chunk])
    levels, parent = [], np.arange(AT_ONCE)
    for depth in range(1, max_depth + 1):
        bits = philox.random_raw(len(parent))
        high = bits >> np.uint64(32)
        splits = ((bits & np.uint64(3)) == 0) & (depth < max_depth)
        choices = np.uint64(4 * (max_arguments - 1))
        choice = ((high * choices) >> np.uint64(32)).astype(np.int64)
        digit = ((high * np.uint64(10)) >> np.uint64(32)).astype(np.int64)
        level = Level(
            parent, np.where(splits, choice % 4, -1), np.where(splits, 0, digit), np.where(splits, 2 + choice // 4, 0)
        )
        levels.append(level)
        parent = np.repeat(np.arange(len(parent)), level.arguments)
    sizes = node_lengths(levels)
    kept = (sizes[0] >= shortest) & (sizes[0] <= longest)
    above = np.arange(AT_ONCE)
    chosen, chosen_sizes = [], []
    for level, size in zip(levels, sizes, strict=True):
        chosen.append(Level(above[level.parent[kept]], *(values[kept] for values in level[1:])))
        chosen_sizes.append(size[kept])
        above = np.cumsum(kept) - 1  # new places of this level's nodes
        kept = np.repeat(kept, level.arguments)
    return chosen, chosen_sizes


def node_lengths(levels: list[Level]) -> list[np.ndarray]:
    """Tokens of every node with all below it."""
    sizes: list[np.ndarray] = [np.ones(len(levels[-1].parent), np.int64)]
    for level in reversed(levels[:-1]):
        below = np.bincount(_parents(level), weights=sizes[0], minlength=len(level.parent)).astype(np.int64)
        sizes.insert(0, np.where(level.operator >= 0, 2 + below, 1))
    return sizes


def write(levels: list[Level], sizes: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of all trees one after another, and the value of each tree."""
    place = np.cumsum(sizes[0]) - sizes[0]
    ids = np.zeros(int(sizes[0].sum()), np.uint8)
    for depth, (level, size) in enumerate(zip(levels, sizes, strict=True)):
        splits = level.operator >= 0
        ids[place] = np.where(splits, FIRST_OPERATOR + level.operator, FIRST_DIGIT + level.digit)
        ids[(place + size - 1)[splits]] = CLOSE
        if depth + 1 < len(levels):
            parent, below = _parents(level), sizes[depth + 1]
            before = np.cumsum(below) - below  # of all nodes to the left in the level
            first = np.concatenate([[0], np.cumsum(level.arguments)[:-1]])[parent]
            place = place[parent] + 1 + before - before[first] if len(parent) else np.zeros(0, np.int64)
    return ids, _values(levels)


def _values(levels: list[Level]) -> np.ndarray:
    value = levels[-1].digit
    for level in reversed(levels[:-1]):
        own, splits = level.digit.copy(), level.operator >= 0
        own[splits] = _results(level.operator[splits], level.arguments[splits], value)
        value = own
    return value


def _results(operator: np.ndarray, arguments: np.ndarray, values: np.ndarray) -> np.ndarray:
    """What operators make of their arguments, which are consecutive ``values``."""
    if not len(operator):
        return np.zeros(0, np.int64)
    first = np.cumsum(arguments) - arguments
    columns = np.arange(int(arguments.max()))
    inside = columns < arguments[:, None]
    table = np.where(inside, values[np.minimum(first[:, None] + columns, len(values) - 1)], 99)
    table.sort(axis=1)
    rows = np.arange(len(operator))
    middle = table[rows, (arguments - 1) // 2] + table[rows, arguments // 2]
    results = (table[:, 0], table[rows, arguments - 1], middle // 2, np.where(table < 99, table, 0).sum(axis=1) % 10)
    return np.choose(operator, results)


def _parents(level: Level) -> np.ndarray:
    """The parent of every node of the level below."""
    return np.repeat(np.arange(len(level.parent)), level.arguments)
