"""ListOps and Pathfinder: what is known of their distributions, and the same bytes on every machine."""

import hashlib

import numpy as np
import pytest

from latte.data.generated import generated
from latte.data.listops import AT_ONCE, SYMBOLS, draw, listops
from latte.data.pathfinder import SIZES, pathfinder_image, pathfinder_images


@pytest.fixture(scope="module")
def trees():
    return listops(3000, seed=0)


def result(tokens):
    """The value of an expression, read token by token."""
    stack = []
    operators = {
        "[MIN": min,
        "[MAX": max,
        "[MED": lambda args: int(np.median(args)),
        "[SM": lambda args: sum(args) % 10,
    }
    for token in tokens:
        symbol = SYMBOLS[token]
        if symbol.startswith("["):
            stack.append([symbol])
        elif symbol == "]":
            name, *arguments = stack.pop()
            assert 2 <= len(arguments) <= 10
            value = operators[name](arguments)
            if not stack:
                return value
            stack[-1].append(value)
        else:
            stack[-1].append(int(symbol))
    raise AssertionError("a bracket is open")


def test_trees_are_well_formed_and_labels_are_their_values(trees):
    assert SYMBOLS[0] not in {SYMBOLS[token] for token in np.unique(trees.ids)}
    for index in range(200):
        assert result(trees.ids[trees.starts[index] : trees.starts[index + 1]]) == trees.labels[index]


def test_lengths_and_labels_are_those_of_the_recursive_generator(trees):
    assert trees.lengths.min() > 500
    assert trees.lengths.max() < 2000
    # 6,000 trees of a recursive generator: 1037.3 ± 5.1
    assert trees.lengths.mean() == pytest.approx(1037.3, abs=4 * (trees.lengths.var() / 3000 + 5.1**2) ** 0.5)
    shares = np.bincount(trees.labels, minlength=10) / 3000
    assert shares[[0, 9]] == pytest.approx([0.169, 0.167], abs=0.025)
    assert (shares[1:9] > 0.06).all()
    assert (shares[1:9] < 0.11).all()


def test_one_tree_in_twelve_is_kept():
    kept = sum(len(draw(0, chunk, 501, 1999, 10, 10)[1][0]) for chunk in range(4)) / (4 * AT_ONCE)
    # 6,000 of 71,023 trees of a recursive generator
    expected = 6000 / 71_023
    assert kept == pytest.approx(expected, abs=4 * (expected * (1 / (4 * AT_ONCE) + 1 / 71_023)) ** 0.5)


def test_no_tree_comes_twice():
    small = listops(300, seed=1, shortest=4, longest=5, max_depth=3)
    rows = {small.ids[small.starts[n] : small.starts[n + 1]].tobytes() for n in range(300)}
    assert len(rows) == 300


def test_listops_has_the_same_bytes_everywhere(trees):
    digest = hashlib.sha256(trees.ids.tobytes() + trees.labels.astype("<i8").tobytes()).hexdigest()
    assert digest[:16] == "5d49ebe3c2a83edf"


@pytest.mark.parametrize(("side", "digest"), [(32, "538a92aa6444c69e"), (128, "863f887f180a5a68")])
def test_pathfinder_has_the_same_bytes_everywhere(side, digest):
    images, labels = pathfinder_images(SIZES[side], seed=0, first=0, count=4 if side == 32 else 1)
    assert hashlib.sha256(images.tobytes() + labels.astype("<i8").tobytes()).hexdigest()[:16] == digest


def test_images_use_the_whole_range_and_both_labels():
    images, labels = pathfinder_images(SIZES[32], seed=1, first=0, count=60)
    assert images.min() == 0
    assert (images.max(axis=(1, 2)) == 255).all()
    assert 0.25 < labels.mean() < 0.75
    assert (images > 30).mean() == pytest.approx(0.2, abs=0.05)
    again, _ = pathfinder_image(SIZES[32], seed=1, number=59)
    assert (images[59] == again).all()  # an image depends on its own number alone


def test_processes_give_what_one_gives(monkeypatch):
    monkeypatch.setattr("latte.data.generated.SHARE", 3)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1}, raising=False)
    shared = generated("pathfinder", 7, 5, 32, lambda message: None)
    images, labels = pathfinder_images(SIZES[32], seed=5, first=0, count=7)
    assert (shared.ids.reshape(7, 32, 32) == images).all()
    assert (shared.labels == labels).all()
