"""Every registered mixer, with every set of options it lists, under the whole contract."""

import pytest

from latte.mixers import mixer_class, names
from latte.testing import Case, cases, contract
from latte.testing.looking import check_compile, check_compiled_gradients


@pytest.mark.parametrize("check", contract(), ids=str)
@pytest.mark.usefixtures("each_backend")
def test_contract(check):
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
