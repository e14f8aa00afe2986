"""Mixers of users that break the contract are noticed, in a sentence that says how."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from latte import LatteConfig, LatteForCausalLM, Tokens
from latte.mixers import Mixer, register, registry
from latte.ops import ScanState, diagonal_scan
from latte.testing import ContractError, check_mixer, checks, contract


class Forgetting(Mixer):
    """h_t = e^-0.1 h_{t-1} + x_t: right, and without parameters."""

    def init_state(self, like_BTD):
        return ScanState.empty(like_BTD, like_BTD.shape[2])

    def mix(self, x_BTD, state, tokens):
        return diagonal_scan(torch.full_like(x_BTD, -0.1), x_BTD, state=state, tokens=tokens)


class Stateless(Forgetting):
    """It does not pass its state on."""

    def mix(self, x_BTD, state, tokens):
        return super().mix(x_BTD, state, tokens)[0], None


class Narrow(Forgetting):
    """Its outputs have another width."""

    def mix(self, x_BTD, state, tokens):
        y, after = super().mix(x_BTD, state, tokens)
        return y[..., :3], after


class Unmasked(Forgetting):
    """It reads padding as if it were tokens."""

    def mix(self, x_BTD, state, tokens):
        plain = Tokens.of(x_BTD, reset=tokens.reset, start=torch.zeros(x_BTD.shape[0], dtype=torch.long))
        return super().mix(x_BTD, state, plain)


class Joined(Forgetting):
    """It reads on over the starts of documents."""

    def mix(self, x_BTD, state, tokens):
        plain = Tokens.of(x_BTD, mask=tokens.mask, start=torch.zeros(x_BTD.shape[0], dtype=torch.long))
        return super().mix(x_BTD, state, plain)


class Started(Forgetting):
    """It always starts afresh: what a state holds is lost."""

    def mix(self, x_BTD, state, tokens):
        return super().mix(x_BTD, self.init_state(x_BTD), tokens)


@pytest.fixture
def own(monkeypatch):
    """Registers mixers for one test alone."""
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

    def add(cls):
        return register("mine")(cls)

    return add


def model_of_mine():
    config = LatteConfig(mixer="mine", vocab_size=11, hidden_size=8, num_attention_heads=2, num_hidden_layers=2)
    return LatteForCausalLM(config).eval()


def failed(error):
    """The names of the checks that an error lists."""
    return {line.split(": ")[1] for line in str(error.value).splitlines()[1:]}


def test_a_mixer_without_parameters_keeps_the_contract_trains_and_generates(own):
    own(Forgetting)
    check_mixer("mine")
    model = model_of_mine()
    ids = torch.arange(6)[None]
    model(ids, labels=ids).loss.backward()
    assert model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (1, 9)


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (Stateless, r"mixer 'mine': mix returned no state, expected the ScanState after its tokens"),
        (Narrow, r"mixer 'mine': mix returned shape \(1, 6, 3\), expected \(1, 6, 8\) as x"),
    ],
)
def test_a_mixer_that_returns_something_else_is_refused_at_its_first_call(own, cls, sentence):
    own(cls)
    with pytest.raises(ValueError, match=sentence):
        model_of_mine()(torch.arange(6)[None])
    with pytest.raises(ContractError, match="mix returned") as error:
        check_mixer("mine")
    assert failed(error) == {"call"}


@pytest.mark.parametrize(("cls", "name"), [(Unmasked, "padding"), (Joined, "packing"), (Started, "forms")])
def test_a_mixer_that_ignores_padding_documents_or_its_state_breaks_the_contract(own, monkeypatch, cls, name):
    own(cls)
    some = [check for check in contract("mine") if check.name in ("call", name, "views", "marks")]
    monkeypatch.setattr("latte.testing.checks.contract", lambda name: some)
    with pytest.raises(ContractError, match="mixer 'mine' does not keep the contract") as error:
        check_mixer("mine")
    assert failed(error) == {name}


def test_the_contract_is_parameters_of_a_test(own):
    own(Unmasked)
    by_name = {str(check): check for check in contract("mine")}
    by_name["mine()-compile"]()
    with pytest.raises(ContractError, match=r"mine\(\): pads_say_nothing: .*\(the rule: Other pads"):
        by_name["mine()-pads_say_nothing"]()


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"unknown mixer 'latter' .did you mean 'latte'"):
        check_mixer("latter")


#: Modules that are None in sys.modules can't be imported.
NEEDS = """
import sys
sys.modules["pytest"] = sys.modules["hypothesis"] = None
try:
    import latte.testing
except ImportError as error:
    print(error)
del sys.modules["hypothesis"]
import latte.testing
"""


def test_hypothesis_is_needed_and_pytest_is_not():
    done = subprocess.run([sys.executable, "-c", NEEDS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "latte.testing draws inputs with hypothesis: pip install 'latte-attention[testing]'\n"


def test_assertions_are_needed():
    """As under ``python -O``, which compiles a module without them."""
    optimised = {"__name__": checks.__name__}
    exec(compile(Path(checks.__file__).read_text(), checks.__file__, "exec", optimize=1), optimised)
    with pytest.raises(RuntimeError, match="check_mixer needs assertions, but they are off"):
        optimised["check_mixer"]("gla")
