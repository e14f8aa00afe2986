"""Settings of the whole suite: the same examples on every run, and no threads that only wait for each other."""

import gc
import os
import random

# MKL chooses its code by the processor, and its AVX-512 code rounds otherwise. Tests compare with what was computed on
# processors where it runs the code for AVX2 (all of AMD's too): the same products on every one. Before torch loads it.
os.environ.setdefault("MKL_ENABLE_INSTRUCTIONS", "AVX2")

import numpy
import pytest
import torch
from hypothesis import Phase, settings

from latte.ops import native

# Hypothesis chooses the same examples each time, keeps nothing on disk, and measures no time.
EXAMPLES = int(os.environ.get("LATTE_EXAMPLES", "12"))  # make test-all draws more
EVERY_CASE = EXAMPLES > 12  # and runs what is sampled otherwise
settings.register_profile("latte", derandomize=True, database=None, deadline=None, max_examples=EXAMPLES)
# Where only whether a test fails matters (scripts/mutants.py), failures need not be made small.
settings.register_profile("unshrunk", settings.get_profile("latte"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("latte")

pytest.register_assert_rewrite("latte.testing")

#: The paths that a test can be sent through: torch, and the native kernels where they were built.
BACKENDS = ["torch", "native"] if native.available() else ["torch"]
THREADS = torch.get_num_threads()


def pytest_collection_finish() -> None:
    """Thousands of tests and all modules stay until the end: collections of garbage need not look at them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    """One thread for the small tensors of most tests, which is many times faster than two; all for native kernels."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    torch.set_num_threads(THREADS if alone and "native" in request.path.parts else 1)


@pytest.fixture(autouse=True)
def seeds() -> None:
    """The same draws in every run, whichever tests ran before in this process."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(params=BACKENDS)
def each_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test once for every path."""
    monkeypatch.setenv("LATTE_BACKEND", request.param)
    return request.param


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each token that the kernel for whole models has read."""
    seen: list[int] = []
    kernel = native.Call.run
    monkeypatch.setattr(native.Call, "run", lambda call: seen.append(1) or kernel(call))
    return seen
