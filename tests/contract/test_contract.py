"""Every registered mixer, with every set of options it lists, under the whole contract."""

import itertools

import pytest

from latte.mixers import mixer_class, names
from latte.testing import Case, cases, contract
from latte.testing.looking import check_compile, check_compiled_gradients
from tests.conftest import BACKENDS, EVERY_CASE


def runs():
    """Each check on each backend; a graph, which takes seconds to capture, on one of them in turn."""
    turn = itertools.cycle(BACKENDS)
    for check in contract():
        sampled = check.name == "compile" and not EVERY_CASE
        for backend in [next(turn)] if sampled else BACKENDS:
            yield pytest.param(backend, check, id=f"{backend}-{check}")


@pytest.mark.parametrize(("backend", "check"), list(runs()))
def test_contract(backend, check, monkeypatch):
    monkeypatch.setenv("LATTE_BACKEND", backend)
    check()


@pytest.mark.parametrize(
    "case", [Case("latte", (("num_latents", 8),)), Case("linear", (("bidirectional", True),))], ids=str
)
def test_compiled_to_machine_code(case):
    check_compile(case, "inductor")


@pytest.mark.parametrize(
    "case", [Case("latte", (("num_latents", 8), ("feed", "rglru"), ("window", 3))), Case("gla", ())], ids=str
)
@pytest.mark.usefixtures("each_backend")
def test_compiled_gradients(case):
    check_compiled_gradients(case)


def test_every_registered_mixer_is_under_the_contract():
    assert {case.name for case in cases()} == set(names())


def test_every_direction_of_every_mixer_has_an_example():
    for name in names():
        directions = {"bidirectional" if case.bidirectional else "causal" for case in cases(name)}
        assert directions == set(mixer_class(name).directions), name


def test_every_option_of_latte_has_an_example():
    """Beside the defaults: each option appears with another value somewhere."""
    options = mixer_class("latte").Options.__dataclass_fields__
    varied = {key for case in cases("latte") for key, value in case.example}
    assert set(options) <= varied
